"""Draws the paper's figures from run folders: PNG and SVG files with captions, and a gallery of all of them."""
