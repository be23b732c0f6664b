"""An environment in the format of verifiers 0.4: a question, and a tool that looks it up."""

# pyright: basic, reportMissingImports=false

import verifiers.v1 as vf

__all__ = ["LookUpTaskset"]


class Digits(vf.Toolset[vf.ToolsetConfig]):
    """The server of the tools."""

    @vf.tool
    def look_up(self, key: int) -> str:
        """Return the digit of a key."""
        return str(key + 3)


class LookUpData(vf.TaskData):
    """A row with its answer."""

    answer: str


class LookUpConfig(vf.TaskConfig):
    """Settings of the tools."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookUp(vf.Task[LookUpData, vf.State, LookUpConfig]):
    """A task with its tools and its rewards."""

    @classmethod
    def toolsets(cls, config: LookUpConfig) -> list[vf.Toolset]:
        return [Digits(config.tools)]

    @vf.reward(weight=0.75)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LookUpTasksetConfig(vf.TasksetConfig):
    """Settings of the tasks."""

    task: LookUpConfig = LookUpConfig()


class LookUpTaskset(vf.Taskset[LookUp, LookUpTasksetConfig]):
    """Two tasks."""

    def load(self) -> list[LookUp]:
        rows = (LookUpData(prompt=f"Which digit has {key}?", answer=str(key + 3)) for key in (1, 2))
        return [LookUp(row, self.config.task) for row in rows]


if __name__ == "__main__":
    Digits.run()
