"""Configures `make docs`: the repository's pages as a site with search, in build/site/index.html."""

project = "megatron_dppo"
html_title = "megatron_dppo"
html_theme = "furo"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
root_doc = "docs/index"
# The repository calls the first page of a folder README.
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["mermaid"]
# GitHub's anchors, which the pages link to.
myst_heading_anchors = 4
html_show_sourcelink = False
