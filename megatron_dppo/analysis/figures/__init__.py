"""The paper's figures, drawn of run folders: PNG and SVG files with captions, and a gallery of all of them."""
