"""Golden values of the reference implementation (Long-CLIP's layout), in ../shared/parity: encoders and the stretch."""
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from debias_clip.models import create_model, encode_texts, load_checkpoint, stretch_positions

FOLDER = Path(__file__).parents[2]/"shared"/"parity"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="golden values are not here (../shared/parity)")


def relative(a, b): return ((a - b).norm()/b.norm()).item()


@pytest.fixture(scope="module")
def golden(): return load_file(FOLDER/"golden.safetensors")


@pytest.fixture(scope="module")
def model(parity_backbone): return load_checkpoint(FOLDER/"model.safetensors", parity_backbone).eval()


def plain(model, tokens): return model.encode_text(tokens)


def test_what_the_layout_tells(model):
    assert (model.context_length, model.base_length, model.keep, model.stretch_factor) == (248, 77, 20, 4)


@pytest.mark.parametrize("encode", [encode_texts, plain])
@pytest.mark.parametrize("which", ["long", "short"])
@torch.no_grad()
def test_text_features(model, golden, encode, which):
    features, want = encode(model, golden[f"tokens_{which}"].long()), golden[f"text_features_{which}"]
    assert relative(features, want) < 1e-5 and (features - want).abs().max() < 1e-5*want.abs().max()


@torch.no_grad()
def test_image_features(model, golden):
    assert relative(model.encode_image(golden["images"]), golden["image_features"]) < 1e-5


def test_stretch(golden):
    base, want = golden["positions_77"], golden["positions_248"]
    long = stretch_positions(base)
    assert long.shape == (248, 128) and torch.equal(long[:20], base[:20])
    torch.testing.assert_close(long, want, rtol=2e-3, atol=2e-3)     # the reference stretched in half precision …
    long = stretch_positions(base.half()).float()                    # … from a table in half precision
    torch.testing.assert_close(long, want, rtol=0, atol=2e-3)


def test_the_backbone_is_found_by_its_shapes(parity_backbone):
    assert load_checkpoint(FOLDER/"model.safetensors").backbone == parity_backbone


def test_a_stretched_file_is_not_stretched_again(parity_backbone):
    file = FOLDER/"model.safetensors"
    assert create_model(parity_backbone, file).context_length == 248
    with pytest.raises(ValueError, match="196"): create_model(parity_backbone, file, context_length=196)
