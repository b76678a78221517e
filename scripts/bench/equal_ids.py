"""Whether the demo model in float32 says the same at tp 1 and at tp N, in batches of every size.

    python -m nvserve.scripts.bench.equal_ids --tp 2 --output FILE

Prompts are those whose greedy answer never comes near a tie, so that any difference is a fault.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import click

from nvserve.scripts.bench import workloads
from nvserve.scripts.bench.engine import write_result
from nvserve.scripts.bench.output_file import OutputFile
from nvserve.scripts.bench.recovery_report import first_difference
from nvserve.scripts.llm import LLM, Generated, SamplingParams
from nvserve.scripts.model_facts import DEMO_MODEL

CONTEXT: Final = 24  # prompt tokens
CLEAR_GAP: Final = 1e-3  # between the two best log-probabilities: far beyond float32's rounding
LIMIT_S: Final = 300.0  # for one batch
MAX_NUM_SEQS: Final = 32
SCORED: Final = "scored"
GREEDY: Final = "greedy"
KINDS: Final[dict[str, dict[str, Any]]] = {
    SCORED: {"temperature": 0.0, "logprobs": 2},
    GREEDY: {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "truncated": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Round:
    """One batch: how to sample, and which prompts."""

    kind: str
    prompts: list[int]  # by number


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not that of tp 1 in the first batch that had it."""

    tp_size: int
    kind: str
    batch: int
    prompt: int
    position: int | None  # of the first other id; None when only the lengths differ


def rounds_of(num_prompts: int, max_batch: int) -> list[Round]:
    """All prompts in each way, and greedy ones in batches of every size that pass through them."""
    everyone = list(range(num_prompts))
    rounds = [Round(kind, everyone) for kind in KINDS if kind != GREEDY]
    begin = 0
    for batch in range(1, max_batch + 1):
        rounds.append(Round(GREEDY, [(begin + i) % num_prompts for i in range(batch)]))
        begin += batch
    return rounds


def compare(
    rounds: Sequence[Round], answers: dict[int, list[list[Ids]]], num_tokens: int
) -> list[Difference]:
    """Every answer, by tp and round, beside the first one to its prompt; all must be whole."""
    references: dict[tuple[str, int], Ids] = {}
    found = []
    for tp_size, of_rounds in answers.items():
        for one, batch in zip(rounds, of_rounds, strict=True):
            kind = GREEDY if one.kind == SCORED else one.kind  # the same ids, asked otherwise
            for prompt, ids in zip(one.prompts, batch, strict=True):
                expected = references.setdefault((kind, prompt), ids)
                if ids != expected or len(ids) != num_tokens:
                    place = first_difference(ids, expected)
                    found.append(Difference(tp_size, one.kind, len(batch), prompt, place))
    return found


def answer(
    llm: LLM, kind: str, numbers: Sequence[int], prompts: Sequence[Ids], num_tokens: int
) -> list[Generated]:
    """One batch; seeds belong to the prompts."""
    params = [
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1000 + number, **KINDS[kind])
        for number in numbers
    ]
    return llm.generate([prompts[number] for number in numbers], params, limit_s=LIMIT_S)


def choose_clear(llm: LLM, num_prompts: int, num_tokens: int) -> list[Ids]:
    """Random prompts whose greedy answers keep CLEAR_GAP; fewer when there are not enough."""
    config = json.loads((DEMO_MODEL / "config.json").read_bytes())
    candidates = workloads.draw_prompts(
        2 * num_prompts, CONTEXT, Random(0), config["vocab_size"] - 1
    )
    scored = answer(llm, SCORED, range(len(candidates)), candidates, num_tokens)
    return [
        one.prompt_token_ids
        for one in scored
        if all(
            best.top_logprobs[0] - best.top_logprobs[1] >= CLEAR_GAP
            for best in one.outputs[0].logprobs or ()
        )
    ][:num_prompts]


@click.command(context_settings={"show_default": True})
@click.option("--tp", type=click.IntRange(2), default=2, help="Compared with 1.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--num-kv-blocks", default=0, help="Exact pool size, 0 to measure.")
@click.option("--num-prompts", type=click.IntRange(1), default=20)
@click.option("--max-batch", type=click.IntRange(1), default=17, help="Batches of 1 to so many.")
@click.option("--output-len", type=click.IntRange(1), default=64, help="Tokens of an answer.")
@click.option("--output", type=OutputFile(), help="JSON of the result.")
def main(
    *,
    tp: int,
    device: str,
    num_kv_blocks: int,
    num_prompts: int,
    max_batch: int,
    output_len: int,
    output: Path | None,
) -> None:
    """Compare the demo model's answers at tp 1 and tp N; exit status 1 if any differs."""
    answers: dict[int, list[list[Ids]]] = {}
    prompts: list[Ids] = []
    rounds: list[Round] = []
    for tp_size in (1, tp):
        with LLM(
            tensor_parallel_size=tp_size,
            device=device,
            dtype="float32",
            max_num_seqs=MAX_NUM_SEQS,
            num_kv_blocks=num_kv_blocks,
            gpu_memory_utilization=0.5,
        ) as llm:
            if not prompts:
                prompts = choose_clear(llm, num_prompts, output_len)
                if not prompts:
                    raise click.ClickException("every greedy answer comes near a tie")
                rounds = rounds_of(len(prompts), max_batch)
            answers[tp_size] = [
                [
                    one.outputs[0].token_ids
                    for one in answer(llm, r.kind, r.prompts, prompts, output_len)
                ]
                for r in rounds
            ]
    differences = compare(rounds, answers, output_len)
    num_answers = 2 * sum(len(one.prompts) for one in rounds)
    click.echo(f"{num_answers} answers to {len(prompts)} prompts, {len(differences)} differ")
    for difference in differences[:5]:
        click.echo(f"  {difference}")
    result = {
        "tensor_parallel_size": tp,
        "num_prompts": len(prompts),
        "num_answers": num_answers,
        "output_len": output_len,
        "num_differing": len(differences),
        "differences": [asdict(difference) for difference in differences],
    }
    write_result(output, result)
    if differences:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
