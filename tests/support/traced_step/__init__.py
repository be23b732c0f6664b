"""Runs one rank's gradient step at full size, without weights and without a GPU, to compare it with a plan.

The actor is real: forward, loss, backward and optimizer. Integers and booleans have values: packing, routes,
the sizes of all-to-alls. Floating-point tensors of the device have only shapes; a number that is read from one
is 1, a condition is true. Each expert gets the same number of tokens, and every rank has the same data as this
one. Micro-batches are full of the longest sequences, and as many as are in flight on this pipeline stage.
Kernels are a GPU's: flash attention, fused RMSNorm, grouped products, AdamW over lists of tensors. The step is
not the first.

Not traced: the step's other micro-batches, CUDA, NCCL, the engine, fragmentation, uneven experts.

- `depths.py` runs two depths in new processes and extrapolates the memory of a layer to the model's depth.
- `step.py` replaces functions, builds the actor and takes the step. It restores nothing: a process traces once.
- `tensors.py` decides which results are computed, simulates the other ranks, and counts live bytes and waits.

If the actor starts to use an operator with results that depend on values, define its result in
`FakeFloats._run`. For a kernel that runs on GPUs and not on CPUs, replace it in `step.py` by one that keeps the
same memory.
"""
