"""Models, prompts, engines, ranks and records that the tests of several files use."""
