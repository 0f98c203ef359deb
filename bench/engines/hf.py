"""transformers: one request at a time, a left-padded batch, and its continuous batching.

In: the way. The three are different programs over the same layers, so each is an engine here.
"""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.engines.adapter import Generate, serve

# Its own defaults are taken from the memory of a GPU. These hold every case at once, and are no limit to any.
PAGES, PAGE_SIZE, BATCH_TOKENS = 64, 256, 4096


def load(folder: str, way: str) -> tuple[str, Generate]:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # answers have a fixed length

    def single(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return [batched([prompt], new_tokens)[0] for prompt in prompts]

    @torch.inference_mode()
    def batched(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return [row[longest:].tolist() for row in made]

    def continuous(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        made = model.generate_batch(
            prompts,
            GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=PAGE_SIZE, num_blocks=PAGES, max_batch_tokens=BATCH_TOKENS, allow_block_sharing=False
            ),
        )
        if len(made) != len(prompts):
            raise RuntimeError(f"generate_batch answered {len(made)} of {len(prompts)} prompts")
        by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in made.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    ways: dict[str, Generate] = {"single": single, "batched": batched, "continuous": continuous}
    return f"transformers {transformers.__version__} {way}", ways[way]


if __name__ == "__main__":
    serve(load)
