"""Decodes images to uint8 views on the device: headers, DALI, Pillow, resizing."""
