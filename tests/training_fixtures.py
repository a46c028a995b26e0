"""Fixtures of the trainer's tests, for files that say `pytest_plugins = ["training_fixtures"]`."""
import multiprocessing

import pytest
import torch
from training_runs import SECOND_STEP, SMALL, steps_seen

from debias_clip.config import TrainConfig
from debias_clip.models import create_model, save_checkpoint
from debias_clip.train import train

@pytest.fixture(scope="session")
def starts(tmp_path_factory):
    "Backbone -> file of random weights at pre-training's length, which is quicker than a pre-training."
    folder, files = tmp_path_factory.mktemp("starts"), {}
    for backbone in ("trained-clip", "trained-siglip", "trained-dropout", "trained-resnet", "trained-convnext"):
        torch.manual_seed(0)
        model = create_model(backbone, context_length=28, keep=8)
        for name, parameter in model.named_parameters():     # convnext's blocks begin at a millionth of their output
            if name.endswith("gamma"): torch.nn.init.ones_(parameter)
        files[backbone] = str(save_checkpoint(model, folder/f"{backbone}.safetensors"))
    return files


@pytest.fixture(scope="session")
def arm(starts): return TrainConfig(**SMALL, init=starts["trained-clip"])


@pytest.fixture(scope="session")
def whole(arm, tmp_path_factory):
    "A run left alone, and the samples of its steps."
    with pytest.MonkeyPatch.context() as patch:
        seen = steps_seen(patch)
        return train(arm, tmp_path_factory.mktemp("whole"), SECOND_STEP), seen


@pytest.fixture(scope="session")
def processes():
    "Makes processes that have torch imported already."
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training_runs", "torch.utils.tensorboard"])
    return context.Process
