"""Whether compiled blocks repay their compilation: the rule behind ``GRAPH_MODE``. Imports no torch.

``train.compile: true`` compiles always; this rule decides where the choice is left to us. Compilation
costs about the same whatever the size of the model, since all blocks of one kind share one program; what
it saves grows with the work of the job. So: compile where a compiler is at hand and what it saves is at
least what it costs.
"""

from __future__ import annotations

from shardwise.spec.plan import DeviceType, Plan
from shardwise.spec.run import RunConfig

# Seconds to compile the forward and the backward pass of one kind of block, and the evaluation's forward.
COMPILE_SECONDS: dict[DeviceType, float] = {"cpu": 60.0, "cuda": 60.0, "npu": 120.0}
# What a process reaches in eager blocks, FLOP/s: an estimate of the right order is enough for this rule.
EAGER_FLOPS: dict[DeviceType, float] = {"cpu": 5e10, "cuda": 1e14, "npu": 1e14}
SAVED_SHARE = 0.1  # of the time in blocks
DEFAULT_ROW_TOKENS = 512  # where data.max_length does not say how long rows are


def compile_rule(run: RunConfig, plan: Plan, num_steps: int, compiler_available: bool) -> tuple[bool, str]:
    """Whether to compile the blocks of a job, and a sentence that says why.

    Args:
        num_steps: optimizer steps of the job.
        compiler_available: whether the machine has what compilation needs.
    """
    if not compiler_available:
        return False, "blocks run eagerly: this machine has no compiler for them"
    if run.lora is not None and run.lora.dropout:
        return False, f"blocks run eagerly: the masks of lora.dropout = {run.lora.dropout} do not compile"
    if plan.model.num_experts:
        return False, "blocks run eagerly: the loop over experts does not compile"
    if plan.strategy.schedule == "zero_bubble":
        return False, "blocks run eagerly: zero_bubble runs their backward passes in two halves, which do not compile"
    seconds = block_seconds(run, plan, num_steps)
    saved, cost = SAVED_SHARE * seconds, COMPILE_SECONDS[plan.device_type]
    facts = f"about {saved:.0f} s of {seconds:.0f} s in {num_steps} steps, and takes about {cost:.0f} s"
    if saved < cost:
        return False, f"blocks run eagerly: compilation would save {facts}"
    return True, f"blocks are compiled: it saves {facts}"


def block_seconds(run: RunConfig, plan: Plan, num_steps: int) -> float:
    """Seconds that the largest stage of a job spends in its blocks, by 6 FLOPs a parameter and token.

    The factor (2 forward, 4 backward) is that of Kaplan et al. 2020 (arXiv:2001.08361, section 2.1); attention
    and recomputation are left out.
    """
    model, strategy = plan.model, plan.strategy
    length = min(run.data.max_length or DEFAULT_ROW_TOKENS, model.max_position_embeddings)
    tokens = plan.global_batch_size // strategy.dp * length
    parameters = max(strategy.stages) * model.block_parameters / strategy.tp
    return num_steps * 6.0 * parameters * tokens / EAGER_FLOPS[plan.device_type]
