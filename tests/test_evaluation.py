from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash import config
from dflash.decode import Reference, Response
from dflash.evaluation import acceptance, acceptance_length, difference, evaluate, judge, looping
from dflash.model import Drafter


def response(kept: tuple[int, ...], accepted: tuple[int, ...]) -> Response:
    return Response(tokens=tuple(range(1 + sum(kept))), kept=kept, accepted=accepted)


def reference(tokens: tuple[int, ...]) -> Reference:
    return Reference(tokens=tokens, gaps=tuple(0.5 + place for place in range(len(tokens))))


def test_tau_is_the_mean_of_the_responses_means_not_of_all_cycles() -> None:
    short, long = response((4,), (3,)), response((1, 1, 1, 1), (0, 0, 0, 0))
    assert acceptance_length([short, long]) == 2.5


def test_tau_leaves_out_a_response_without_a_cycle_and_is_none_without_any() -> None:
    assert acceptance_length([response((), ()), response((3,), (2,))]) == 3.0
    assert acceptance_length([response((), ())]) is None
    assert acceptance_length([]) is None


def test_acceptance_counts_a_slot_only_in_cycles_in_which_it_lay_in_the_response() -> None:
    # blocks of 4; 7 tokens: 1 of the prefill, 4 kept, and of the last cycle, which matched 3, only 2 are left
    assert acceptance([response((4, 2), (3, 3))], 4) == (1.0, 1.0, 1.0)
    assert acceptance([response((2, 1, 2), (1, 0, 1))], 4) == (2 / 3, 0.0, 0.0)
    # its third slot lay in the response only in the first two cycles
    assert acceptance([response((4, 1, 1), (3, 0, 0))], 4) == (1 / 3, 1 / 2, 1.0)


def test_acceptance_of_nothing_is_nothing() -> None:
    assert acceptance([], 3) == (0.0, 0.0)


@pytest.mark.parametrize("period", [1, 7, 32])
def test_a_tail_with_a_period_of_at_most_32_is_a_loop(period: int) -> None:
    unit = list(range(period))
    assert looping([99] * 40 + [unit[place % period] for place in range(64)])


def test_a_longer_period_a_broken_one_and_a_short_response_are_no_loops() -> None:
    assert not looping([place % 33 for place in range(100)])
    assert not looping([*[1] * 63, 2])
    assert not looping([1] * 36 + [2] + [1] * 63)
    assert not looping([1] * 63)


def test_a_difference_names_its_place_both_tokens_and_the_gap_there() -> None:
    found = difference(4, response((3,), (2,)), reference((0, 1, 7, 3)))
    assert found is not None
    assert asdict(found) == {"prompt": 4, "place": 2, "expected": 7, "found": 2, "gap": 2.5}


def test_a_response_that_ends_elsewhere_differs_where_the_shorter_one_ended() -> None:
    longer = difference(0, response((3,), (2,)), reference((0, 1)))
    shorter = difference(0, response((1,), (0,)), reference((0, 1, 2)))
    assert longer is not None
    assert shorter is not None
    assert (longer.place, longer.expected, longer.found, longer.gap) == (2, None, 2, None)
    assert (shorter.place, shorter.expected, shorter.found, shorter.gap) == (2, 2, None, 2.5)


def test_equal_responses_are_counted_and_looping_ones_left_out_of_one_tau() -> None:
    responses = [response((4,), (3,)), response((2, 2), (1, 1)), response((1,), (0,))]
    references = [reference(tuple(range(5))), reference(tuple(range(5))), reference((0, 9))]
    judged = judge("somebody", responses, references, [True, False, False], 4, 1.5)
    assert judged.tau == pytest.approx((4 + 2 + 1) / 3)
    assert judged.tau_without_loops == pytest.approx((2 + 1) / 2)
    assert (judged.cycles, judged.identical, judged.seconds) == (4, 2, 1.5)
    assert [one.prompt for one in judged.differences] == [2]


def test_an_evaluation_compares_four_proposers_with_the_target_and_is_json() -> None:
    sizes = config.Drafter(
        hidden_size=32,
        intermediate_size=48,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=16,
        vocab_size=40,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        mask_token_id=39,
        target_layers=2,
        target_layer_ids=(0,),
    )
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3, "eos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads))  # type: ignore[arg-type]  # of every field's own type
    drafter, untrained = Drafter(sizes), Drafter(sizes)
    drafter.initialise(1)
    untrained.initialise(2)
    told: list[tuple[str, int, int]] = []
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    found = evaluate(
        model, drafter, untrained, prompts, 20, block=4, rows=2, report=lambda *progress: told.append(progress)
    )
    names = ["trained", "blanked features", "untrained", "prompt lookup"]
    assert [decoder.name for decoder in found.decoders] == names
    assert [name for name, done, total in told if done == total == 60] == ["target alone", *names]
    assert (found.prompts, found.new_tokens, found.block, found.dtype) == (3, 20, 4, "float32")
    for decoder in found.decoders:
        assert decoder.identical == 3, decoder.differences
        assert decoder.tau is not None
        assert 1 <= decoder.tau <= 4
        assert len(decoder.acceptance) == 3
    assert found.of("prompt lookup") is found.decoders[3]
    assert json.loads(json.dumps(asdict(found)))["decoders"][0]["name"] == "trained"
