"""Pydantic AI: python pydantic_agents.py QUESTION openai-chat:policy|anthropic:policy."""

# pyright: reportMissingImports=false

import sys

from pydantic_ai import Agent

agent = Agent(sys.argv[2], instructions="Be brief.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


found = agent.run_sync(sys.argv[1]).output
sys.exit(f"found {found!r}" if found != "It is 5." else 0)
