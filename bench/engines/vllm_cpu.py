"""vLLM's CPU build, its engine core in this process.

Prefix caching is off, because every engine is to compute every prompt. Eager: there is no graph on a CPU, and
compiling takes minutes.
"""

from __future__ import annotations

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm

from bench.engines.adapter import Generate, serve


def load(folder: str) -> tuple[str, Generate]:
    engine = vllm.LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        wish = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(made.outputs[0].token_ids) for made in engine.generate(asked, wish, use_tqdm=False)]

    return f"vLLM {vllm.__version__}", generate


if __name__ == "__main__":
    serve(load)
