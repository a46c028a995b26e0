"""A model by its name: published weights, and the image transform that goes with them."""
import warnings

import open_clip
import pytest
import torch
from PIL import Image
from tiny import CONFIGS, openai_state, registered, same_as_open_clip, save

from debias_clip.models import create_model, create_model_and_transforms, right_activation, stretch_positions

@pytest.fixture(scope="module", autouse=True)
def configs(tmp_path_factory):
    torch.manual_seed(0)
    with registered(CONFIGS, tmp_path_factory.mktemp("configs")): yield


@pytest.mark.parametrize("backbone", ["ViT-B-16", "ViT-L-14", "ViT-L-14-336"])
def test_openai_weights_get_quickgelu(backbone):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (backbone, f"{backbone}-quickgelu"):
            assert right_activation(name, "openai") == f"{backbone}-quickgelu"


@pytest.mark.parametrize("backbone,tag", [
    ("ViT-B-16", "laion2b_s34b_b88k"), ("ViT-B-16-SigLIP", "webli"), ("ViT-B-16-SigLIP2", "webli")])
def test_others_keep_theirs(backbone, tag):
    assert right_activation(backbone, tag) == backbone


def test_a_published_tag_goes_through_our_loader(tmp_path, monkeypatch):
    state, published = openai_state(), open_clip.pretrained._PRETRAINED
    file = save(state, tmp_path/"m", "pt")
    tag = {"openai": open_clip.pretrained._pcfg(file=str(file), quick_gelu=True, mean=(.1, .2, .3))}
    for name in ("tiny-clip", "tiny-clip-quickgelu"): monkeypatch.setitem(published, name, tag)
    with pytest.warns(UserWarning, match="tiny-clip-quickgelu is used"):
        model, _, _ = create_model_and_transforms("tiny-clip", "openai")
    assert model.backbone == "tiny-clip-quickgelu" and model.context_length == 248
    assert model.visual.preprocess_cfg["mean"] == (.1, .2, .3)
    state["positional_embedding"] = stretch_positions(state["positional_embedding"])
    same_as_open_clip(model, state)
    with pytest.raises(ValueError, match="Published: openai"): create_model("tiny-clip", "laion")
    monkeypatch.delitem(open_clip.factory._MODEL_CONFIGS, "tiny-clip-quickgelu")
    with pytest.raises(ValueError, match="no tiny-clip-quickgelu"): create_model("tiny-clip", "openai")


def test_weights_out_of_reach_are_said_soon(monkeypatch):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="pretrained=FILE"): create_model("ViT-B-16", "laion2b_s34b_b88k")


@pytest.mark.parametrize("backbone,keep,mean,std", [
    ("scenes-clip", 8, .48145466, .26862954), ("ViT-B-16-SigLIP", 20, .5, .5)])
def test_transforms_are_the_backbones_own(backbone, keep, mean, std):
    with torch.device("meta"): _, _, evaluate = create_model_and_transforms(backbone, keep=keep)
    grey = evaluate(Image.new("RGB", (60, 30), (128,)*3))[0, 5, 5].item()
    assert abs(grey - (128/255 - mean)/std) < 1e-4


def test_transforms_take_any_picture():
    _, train, evaluate = create_model_and_transforms("scenes-siglip", keep=8)
    assert train(Image.new("L", (60, 80))).shape == evaluate(Image.new("RGBA", (60, 80))).shape == (3, 48, 48)
