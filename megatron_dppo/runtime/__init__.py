"""Device and rank of this process, optional libraries, user code, and small files."""
