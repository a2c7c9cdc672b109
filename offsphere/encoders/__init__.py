"""Encoders: timm images, open_clip towers, text encoders. They always return raw vectors."""
