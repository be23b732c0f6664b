"""What the runs of a grid are forked from: everything is imported, without the libraries' warnings."""

from megatron_dppo.runtime.process import quiet_library_warnings

quiet_library_warnings()

import megatron_dppo.train  # noqa: E402, F401 - after the warnings are silenced
