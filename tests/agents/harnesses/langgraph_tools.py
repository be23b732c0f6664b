"""LangGraph with LangChain's client: python langgraph_tools.py QUESTION."""

# pyright: reportMissingImports=false

import sys

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


policy = ChatOpenAI(model="policy").bind_tools([add])
graph = StateGraph(MessagesState)
graph.add_node("policy", lambda state: {"messages": [policy.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "policy")
graph.add_conditional_edges("policy", tools_condition)
graph.add_edge("tools", "policy")
found = graph.compile().invoke({"messages": [HumanMessage(sys.argv[1])]})["messages"][-1].content
sys.exit(f"found {found!r}" if found != "It is 5." else 0)
