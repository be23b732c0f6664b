"""Every step that needs a GPU, in one command on one machine; see __main__.py."""
