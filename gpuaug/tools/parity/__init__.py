"""`gpuaug parity`: our pixels compared with Pillow's, torchvision's and timm's."""
