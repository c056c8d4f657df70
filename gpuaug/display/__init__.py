"""Pictures: pages of captioned pictures, annotations drawn on images, batches and recipes as a notebook shows them."""
