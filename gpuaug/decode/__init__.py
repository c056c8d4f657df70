"""Decodes images to uint8 views on the device."""
