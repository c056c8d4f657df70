"""`gpuaug parity`: our pixels compared with Pillow's and torchvision's."""
