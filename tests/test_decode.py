from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash import config, decode, mask
from dflash.decode import NOTHING, greedy, speculate
from dflash.model import Drafter
from dflash.proposers import Drafting, PromptLookup, follow
from env.errors import Exit, Failure

VOCABULARY = 60
BLOCK = 4
NEW = 24
SIZES = config.Drafter(
    hidden_size=64,
    intermediate_size=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=VOCABULARY,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    mask_token_id=VOCABULARY - 1,
    target_layers=3,
    target_layer_ids=(0, 2),
)
# initializer_range: far from the usual 0.02, so that a random model has clear preferences and no near-ties
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and lose much to them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_model(kind: str = "qwen3") -> PreTrainedModel:
    torch.manual_seed(7)
    model: PreTrainedModel
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    else:
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, layer_types=layers))
    model.train(False)
    return model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of different lengths, so that rows are padded, and one of a single token."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY - 1, (n,), generator=generator).tolist() for n in (20, 7, 13, 1)]


@pytest.fixture
def drafter() -> Drafter:
    drafter = Drafter(SIZES)
    drafter.initialise(5)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(12)  # fresh weights propose one token throughout; these have opinions
    return drafter.requires_grad_(False)


class Knowing:
    """Proposes the target's own tokens, spoilt at random: what it gets right is known."""

    taps: tuple[int, ...] = ()

    def __init__(self, texts: Sequence[Sequence[int]], right: float, block: int = BLOCK) -> None:
        self.texts, self.right, self.block = texts, right, block
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], fresh: Sequence[Tensor]) -> Tensor:
        proposals = torch.full((len(rows), self.block - 1), NOTHING)
        for place, (row, text) in enumerate(zip(rows, tokens, strict=True)):
            assert list(text) == list(self.texts[row][: len(text)])
            ahead = torch.tensor([*self.texts[row], *([0] * self.block)][len(text) : len(text) + self.block - 1])
            wrong = torch.rand(ahead.shape, generator=self.generator) >= self.right
            proposals[place] = torch.where(wrong, (ahead + 1) % VOCABULARY, ahead)
        return proposals


class Listening:
    """Proposes nothing that could be right and keeps the features it is shown, row by row."""

    block = BLOCK

    def __init__(self, taps: tuple[int, ...], inner: decode.Proposer) -> None:
        self.taps, self.inner = taps, inner
        self.heard: dict[int, list[Tensor]] = {}

    def __call__(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], fresh: Sequence[Tensor]) -> Tensor:
        for row, text, features in zip(rows, tokens, fresh, strict=True):
            self.heard.setdefault(row, []).append(features)
            assert sum(len(one) for one in self.heard[row]) == len(text) - 1
        return self.inner(rows, tokens, fresh)


def own_texts(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int = NEW) -> list[list[int]]:
    """Prompt and greedy continuation by transformers' `generate`, one prompt at a time: no padding, no code of ours."""
    target: Any = model
    return [
        target.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0].tolist() for prompt in prompts
    ]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "sliding windows"])
def test_greedy_in_one_padded_batch_is_what_generate_says_of_each_prompt_alone(
    kind: str, prompts: list[list[int]]
) -> None:
    model = random_model(kind)
    references = greedy(model, prompts, NEW)
    texts = [[*prompt, *reference.tokens] for prompt, reference in zip(prompts, references, strict=True)]
    assert texts == own_texts(model, prompts)


def test_gaps_are_the_lead_of_the_best_logit(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    reference = greedy(model, prompts[1:2], 5)[0]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompts[1], *reference.tokens]])).logits[0, len(prompts[1]) - 1 : -1]
    best = logits.topk(2, -1).values
    torch.testing.assert_close(torch.tensor(reference.gaps), best[:, 0] - best[:, 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "sliding windows"])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_output_is_the_targets_own_whatever_is_proposed(kind: str, right: float, prompts: list[list[int]]) -> None:
    model = random_model(kind)
    texts = own_texts(model, prompts)
    responses = speculate(model, Knowing(texts, right), prompts, NEW)
    assert [[*prompt, *one.tokens] for prompt, one in zip(prompts, responses, strict=True)] == texts


def test_a_proposer_that_is_always_right_has_whole_blocks_kept_and_the_last_one_capped(
    model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    # 1 token of the prefill + 5 cycles of 4 = 21; the sixth could keep 4 again, 3 are left
    texts = own_texts(model, prompts, NEW + BLOCK)
    for response in speculate(model, Knowing(texts, 1.0), prompts, NEW):
        assert response.kept == (4, 4, 4, 4, 4, 3)
        assert response.accepted == (3,) * 6


def test_a_proposer_that_is_always_wrong_costs_a_cycle_a_token(
    model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    for response in speculate(model, Knowing(own_texts(model, prompts), 0.0), prompts, NEW):
        assert response.kept == (1,) * (NEW - 1)
        assert response.accepted == (0,) * (NEW - 1)


def test_accepted_is_the_leading_match_and_kept_one_more(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    for response in speculate(model, Knowing(own_texts(model, prompts), 0.6), prompts, NEW):
        assert 1 + sum(response.kept) == len(response.tokens) == NEW
        assert [kept - 1 for kept in response.kept[:-1]] == list(response.accepted[:-1])
        assert len(set(response.accepted)) > 1, "rows must have advanced at different speeds"


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_a_stop_token_ends_a_response_and_is_its_last_token(
    right: float, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    texts = own_texts(model, prompts)
    outputs = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    stop = outputs[0][9]
    ends = [output.index(stop) + 1 if stop in output else NEW for output in outputs]
    assert len(set(ends)) > 1
    expected = [tuple(output[:end]) for output, end in zip(outputs, ends, strict=True)]
    assert [one.tokens for one in greedy(model, prompts, NEW, stop=frozenset({stop}))] == expected
    responses = speculate(model, Knowing(texts, right), prompts, NEW, stop=frozenset({stop}))
    assert [one.tokens for one in responses] == expected
    assert all(1 + sum(one.kept) == len(one.tokens) for one in responses)


def test_a_response_that_ends_with_its_first_token_has_no_cycle(
    model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    first = greedy(model, prompts[:1], 1)[0].tokens
    for new, stop in ((1, frozenset[int]()), (NEW, frozenset(first))):
        response = speculate(model, PromptLookup(model, BLOCK), prompts[:1], new, stop=stop)[0]
        assert (response.tokens, response.kept, response.accepted) == (first, (), ())


@pytest.mark.parametrize("right", [0.0, 0.7])
def test_features_are_the_tapped_layers_outputs_over_the_whole_text(
    right: float, model: PreTrainedModel, prompts: list[list[int]]
) -> None:
    texts = own_texts(model, prompts)
    listening = Listening((0, 1), Knowing(texts, right))
    speculate(model, listening, prompts, NEW)
    for row, text in enumerate(texts):
        heard = torch.cat(listening.heard[row])
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        # `hidden_states[j + 1]` is the output of layer j
        expected = torch.cat((states[1], states[2]), -1)[0, : len(heard)]
        torch.testing.assert_close(heard, expected, atol=2e-4, rtol=1e-4)


def test_a_drafter_proposes_in_decoding_what_its_training_pass_would(
    model: PreTrainedModel, prompts: list[list[int]], drafter: Drafter
) -> None:
    """Every proposal of a decoding, against one training pass over the whole text with the mask of `dflash.mask`."""
    texts = own_texts(model, prompts)
    asked: list[tuple[int, int, list[int]]] = []

    class Recording(Drafting):
        def __call__(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], fresh: Sequence[Tensor]) -> Tensor:
            proposals = super().__call__(rows, tokens, fresh)
            for row, text, proposal in zip(rows, tokens, proposals.tolist(), strict=True):
                asked.append((row, len(text) - 1, proposal))
            return proposals

    speculate(model, Recording(drafter, model, BLOCK), prompts, NEW)
    assert len({tuple(proposal) for _, _, proposal in asked}) > 20
    target: Any = model
    for row, text in enumerate(texts):
        anchors = [anchor for asked_row, anchor, _ in asked if asked_row == row]
        position = torch.tensor([anchors])
        block = torch.full((1, len(anchors), BLOCK), SIZES.mask_token_id)
        block[0, :, 0] = torch.tensor([text[anchor] for anchor in anchors])
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            features = torch.cat((states[1], model_layer_output(model, text, 2)), -1)
            seen = mask.dense(position, torch.zeros_like(position), sequence=len(text), block=BLOCK)
            places = (position.unsqueeze(-1) + torch.arange(BLOCK)).flatten(1)
            embedded = target.get_input_embeddings()(block.flatten(1))
            logits = target.lm_head(drafter(embedded, places, features, seen))
        expected = logits.argmax(-1).view(len(anchors), BLOCK)[:, 1:].tolist()
        assert [proposal for asked_row, _, proposal in asked if asked_row == row] == expected


def model_layer_output(model: Any, text: list[int], layer: int) -> Tensor:
    """A layer's output; the last one's is in no `hidden_states`, which ends with the normed one."""
    caught: list[Tensor] = []
    handle = model.model.layers[layer].register_forward_hook(lambda _module, _inputs, output: caught.append(output))
    model(torch.tensor([text]))
    handle.remove()
    return caught[0]


def test_blanked_features_change_what_a_drafter_proposes_and_nothing_else(
    model: PreTrainedModel, prompts: list[list[int]], drafter: Drafter
) -> None:
    features = torch.randn(len(prompts[0]) - 1, 2 * SIZES.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        seeing = Drafting(drafter, model, BLOCK)([0], [prompts[0]], [features])
        blank = Drafting(drafter, model, BLOCK, blank=True)([0], [prompts[0]], [features])
        zeros = Drafting(drafter, model, BLOCK)([0], [prompts[0]], [torch.zeros_like(features)])
    assert blank.tolist() == zeros.tolist() != seeing.tolist()
    texts = own_texts(model, prompts)
    responses = speculate(model, Drafting(drafter, model, BLOCK, blank=True), prompts, NEW)
    assert [[*prompt, *one.tokens] for prompt, one in zip(prompts, responses, strict=True)] == texts


def test_no_hook_stays_on_the_target(prompts: list[list[int]], drafter: Drafter) -> None:
    model = random_model()

    def stop(_tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        speculate(model, Drafting(drafter, model, BLOCK), prompts, NEW, report=stop)
    target: Any = model
    assert not any(layer._forward_hooks for layer in target.model.layers)


def test_tokens_are_reported_as_they_come(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    for decoded in (
        lambda report: greedy(model, prompts, NEW, report=report),
        lambda report: speculate(model, PromptLookup(model, BLOCK), prompts, NEW, report=report),
    ):
        told: list[int] = []
        decoded(told.append)
        assert sum(told) == NEW * len(prompts)
        assert len(told) > 1


def test_an_empty_prompt_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="empty"):
        greedy(model, [[1], []], 2)


def test_a_target_that_ignores_the_cache_it_is_given_is_refused_rather_than_asked_without_context(
    model: PreTrainedModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model.forward

    def ignoring(*, cache: Any, **more: Any) -> Any:  # as a release does in which the argument has another name
        del cache
        return forward(**more)

    monkeypatch.setattr(model, "forward", ignoring)
    with pytest.raises(Failure, match="keeps nothing in the cache that a target is given") as caught:
        greedy(model, prompts, NEW)
    assert caught.value.code is Exit.DRIFT


def test_a_target_whose_state_cannot_be_rolled_back_is_refused_in_one_sentence() -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=16, state_size=4, num_hidden_layers=1))
    with pytest.raises(Failure) as caught:
        speculate(mamba, PromptLookup(mamba, BLOCK), [[1, 2]], 3)
    assert caught.value.code is Exit.INPUT
    assert "`mamba` keeps a state that cannot be rolled back" in caught.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 9, 1, 2, 3], [9, 9, 1]),
        ([1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3], [7, 5, 2]),  # the longer suffix wins over the later place
        ([4, 1, 4, 2, 4], [2, 4, 2]),  # the latest place wins among equals, and the copy goes on with itself
        ([5, 5], [5, 5, 5]),
        ([6], [NOTHING] * 3),
        ([6, 7, 8], [NOTHING] * 3),
    ],
)
def test_prompt_lookup_proposes_what_followed_the_longest_suffix_last(text: list[int], expected: list[int]) -> None:
    assert follow(text, 3) == expected
