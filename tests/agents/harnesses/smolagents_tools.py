"""smolagents: python smolagents_tools.py QUESTION CodeAgent|ToolCallingAgent."""

# pyright: reportMissingImports=false

import sys

import smolagents


@smolagents.tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: A number.
        b: A number.
    """
    return a + b


agent = getattr(smolagents, sys.argv[2])(tools=[add], model=smolagents.OpenAIModel("policy"), max_steps=3)
found = agent.run(sys.argv[1])
sys.exit(f"found {found!r}" if found != 5 else 0)
