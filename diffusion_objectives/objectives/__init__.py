"""Losses, one file a family, each with its mathematics on top."""
