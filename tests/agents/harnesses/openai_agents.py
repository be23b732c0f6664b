"""OpenAI's Agents SDK: python openai_agents.py QUESTION chat_completions|responses."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_tracing_disabled(True)  # traces would go to OpenAI
set_default_openai_api(sys.argv[2])
agent = Agent(name="adder", instructions="Be brief.", model="policy", tools=[add])
found = Runner.run_sync(agent, sys.argv[1]).final_output
sys.exit(f"found {found!r}" if found != "It is 5." else 0)
