"""Tests: each folder is a suite, `support` has what several of them use."""
