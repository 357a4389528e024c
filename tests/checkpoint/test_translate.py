"""Names in a file to names in the model: a prefix or none, old buffers by their exact names, a tied head."""

import pytest
import torch
from checkpoints import TINY, reference, without_prefix
from torch import Tensor

from minigpt import GPT2, CheckpointError, GPT2Config
from minigpt.checkpoint.formats import recognise
from minigpt.checkpoint.translate import as_ours, without_wrappers

TIED = GPT2Config.from_dict(TINY)
UNTIED = GPT2Config.from_dict({**TINY, "tie_word_embeddings": False})


def translate(tensors: dict[str, Tensor], config: GPT2Config) -> dict[str, Tensor]:
    bare = without_wrappers(tensors)
    return as_ours(bare, recognise(bare), config)


@pytest.fixture(scope="module")
def theirs() -> dict[str, Tensor]:
    """The tensors of a file as transformers writes it: with a prefix, and without the head that is tied."""
    tensors = {name: tensor.detach() for name, tensor in reference().state_dict().items()}
    del tensors["lm_head.weight"]
    return tensors


def test_both_key_styles_become_the_names_of_the_model(theirs: dict[str, Tensor]) -> None:
    names = dict(GPT2(TIED).named_parameters()).keys()
    assert all(name.startswith("transformer.") for name in theirs)
    assert translate(theirs, TIED).keys() == translate(without_prefix(theirs), TIED).keys() == names


def test_tensors_are_passed_on_and_not_copied(theirs: dict[str, Tensor]) -> None:
    ours = translate(theirs, TIED)
    assert all(ours[name.removeprefix("transformer.")] is tensor for name, tensor in theirs.items())


def test_the_prefix_is_removed_once_and_at_the_front_only() -> None:
    names = {"transformer.transformer.wte.weight", "my.transformer.ln_f.weight", "transformers.ln_f.bias"}
    expected = {"transformer.wte.weight", "my.transformer.ln_f.weight", "transformers.ln_f.bias"}
    assert translate({name: torch.ones(1) for name in names}, TIED).keys() == expected


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("name", ["h.0.attn.bias", "h.1.attn.masked_bias"])
def test_an_old_buffer_is_skipped(prefix: str, name: str) -> None:
    assert translate({prefix + name: torch.ones(1, 1, 4, 4)}, TIED) == {}


@pytest.mark.parametrize(
    "name",
    [
        "h.0.attn.biases",
        "h.2.attn.bias",
        "h.99.attn.bias",
        "h.00.attn.bias",
        "h.0.attn.c_attn.bias",
        "h.0.attn.bias.bias",
        "attn.bias",
        "h.0.attn.rotary.masked_bias",
        "h.0.attn.masked_bias2",
        "h.0.crossattention.bias",
    ],
)
def test_what_only_resembles_an_old_buffer_is_kept(name: str) -> None:
    assert translate({name: torch.ones(1)}, TIED).keys() == {name}


def test_a_tied_head_may_be_in_the_file_or_not(theirs: dict[str, Tensor]) -> None:
    with_head = theirs | {"lm_head.weight": theirs["transformer.wte.weight"].clone()}
    assert translate(with_head, TIED).keys() == translate(theirs, TIED).keys()


def test_a_head_that_differs_from_what_it_is_tied_to_is_refused(theirs: dict[str, Tensor]) -> None:
    head = theirs["transformer.wte.weight"].clone()
    head.view(torch.int32)[-1, -1] ^= 1  # one bit
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight differs from wte\.weight.*\"tie_word_embeddings\": false"
    ):
        translate(theirs | {"lm_head.weight": head}, TIED)


def test_an_untied_head_is_kept(theirs: dict[str, Tensor]) -> None:
    head = torch.randn(theirs["transformer.wte.weight"].shape)
    assert translate(theirs | {"lm_head.weight": head}, UNTIED)["lm_head.weight"] is head


def test_a_head_is_not_taken_for_an_embedding_that_is_missing(theirs: dict[str, Tensor]) -> None:
    head = {"lm_head.weight": theirs["transformer.wte.weight"]}
    assert "wte.weight" not in translate(head, TIED)
