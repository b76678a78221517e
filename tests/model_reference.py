"""What tests of the models compare with transformers: logits behind every token of a prompt."""

import torch
from step_driver import StepDriver

from nvserve.protocol.messages import Chunks, NewRows, SchedulerOutput, TableChanges, pack_ids
from nvserve.protocol.sampling import SamplingParams


def prompt_logits(driver: StepDriver, prompt: list[int]) -> torch.Tensor:
    """Logits behind every token of a prompt, run as one chunk in slot 0; [T, V]."""
    runner, batch = driver.runner, driver.runner.batch
    num_blocks = -(-len(prompt) // batch.block_size)
    blocks = pack_ids(list(range(1, num_blocks + 1)))
    new = NewRows([0], [SamplingParams()], [0], [b""], [b""])
    delta = SchedulerOutput(0, 0, new=new, tables=TableChanges([0], [0], [num_blocks], blocks))
    with torch.inference_mode():
        batch.apply(delta)
        chunks = Chunks([0], [0], [len(prompt)], pack_ids(prompt), [True])
        inputs = batch.chunk_inputs(batch.upload_chunks(chunks))
        hidden = runner.model.forward(inputs, runner.cache, runner.backend)
        logits = runner.model.logits(hidden)
        batch.apply(SchedulerOutput(0, 1, freed=[0]))
    return logits
