"""Checkpoints of every layout, in and out.

The fixtures are written from the published key lists, not by `save_checkpoint`, and checked against plain open_clip
models.
"""
import copy
import json
import os
import pickle
import warnings
import zipfile

import open_clip
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import CLIP, CONFIGS, captions, five_captions, openai_state, registered, same_as_open_clip, save

from debias_clip import checkpoints
from debias_clip.checkpoints import find_backbone, load_checkpoint, save_checkpoint
from debias_clip.models import create_model, encode_texts, stretch_positions

@pytest.fixture(scope="module", autouse=True)
def configs(tmp_path_factory):
    torch.manual_seed(0)
    with registered(CONFIGS, tmp_path_factory.mktemp("configs")): yield


# state dicts by their published names

def long_clip_state(): return openai_state(248) | {"positional_embedding_res": torch.randn(248, 64)*.1}


def merged(state, official=False):
    "Long-CLIP's layout with one table."
    state = dict(state)
    trained = state.pop("positional_embedding_res")
    if not official: state["positional_embedding"] = torch.cat([state["positional_embedding"][:20], trained[20:]])
    return state


def half(state): return {name: v.half() for name, v in state.items()}


# layouts that are read

@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("precision", [dict, half], ids=["float", "half"])
def test_openai_and_open_clip_state_dicts(tmp_path, kind, precision):
    state, extra = precision(openai_state()), {}
    if precision is half:
        numbers = {"input_resolution": 16, "context_length": 77, "vocab_size": 49408}
        extra = {name: torch.tensor(number) for name, number in numbers.items()}
    file = save(state | extra, tmp_path/"m", kind)
    for name in ("tiny-clip", "tiny-clip-quickgelu"):
        same_as_open_clip(load_checkpoint(file, name), state, "quick" in name)
    with pytest.raises(ValueError, match="tiny-clip and tiny-clip-quickgelu.*activation"): load_checkpoint(file)
    long = create_model("tiny-clip-quickgelu", file)
    stretched = stretch_positions(state["positional_embedding"].float())
    assert long.context_length == 248 and torch.equal(long.positional_embedding, stretched)


def prefixed(prefix, state): return {prefix + name: v for name, v in state.items()}


WRAPPINGS = {
    "training": lambda s: {"state_dict": s, "epoch": 3, "name": "x", "optimizer": {"state": {}}, "scaler": {}},
    "model": lambda s: {"model": s},
    "twice": lambda s: {"state_dict": {"model": s}},
    "ddp": lambda s: prefixed("module.", s),
    "ddp in training": lambda s: {"state_dict": prefixed("module.", s)},
    "compiled ddp": lambda s: prefixed("module._orig_mod.", s),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrappers_and_prefixes(tmp_path, wrapping):
    state = openai_state()
    file = save(WRAPPINGS[wrapping](state), tmp_path/"m", "pt")
    same_as_open_clip(load_checkpoint(file, "tiny-clip"), state, quick_gelu=False)


@pytest.mark.parametrize("quick_gelu", [True, False])
@pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated")
def test_a_torchscript_archive_gives_its_tensors(tmp_path, quick_gelu):
    state, file = openai_state(), tmp_path/"ViT.pt"
    plain = open_clip.CLIP(**copy.deepcopy(CLIP), quick_gelu=quick_gelu).eval()
    plain.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(plain, (torch.randn(1, 3, 16, 16), five_captions(77, 1)))
    for p in traced.parameters(): p.data = p.data.half()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced.save(str(file))
    model = load_checkpoint(file)
    right, wrong = ("tiny-clip-quickgelu", "tiny-clip")[::1 if quick_gelu else -1]
    assert model.backbone == right
    same_as_open_clip(model, half(state), quick_gelu)
    with pytest.raises(ValueError, match=f"name {right} instead"): create_model(wrong, file)


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_long_clip(tmp_path, kind):
    state = half(long_clip_state())
    file = save(state, tmp_path/"m", kind)
    model = load_checkpoint(file)
    assert (model.backbone, model.context_length) == ("tiny-clip-quickgelu", 248)
    assert (model.base_length, model.keep) == (77, 20)
    same_as_open_clip(model, merged(state))
    with pytest.raises(ValueError, match="QuickGELU.*tiny-clip-quickgelu"): load_checkpoint(file, "tiny-clip")


@pytest.mark.parametrize("wrapped", [False, True])
def test_smartclip_sets_its_mask_network_aside(tmp_path, wrapped):
    state = long_clip_state()
    mask = {"mask_net.attn_pool.in_proj_weight": torch.randn(12, 4), "mask_net.block.ln_1.weight": torch.ones(4),
            "mask_net.proj": torch.randn(4, 16)}
    tree = {"model": state | mask, "epoch": 2} if wrapped else state | mask
    same_as_open_clip(load_checkpoint(save(tree, tmp_path/"m", "pt")), merged(state))


def test_the_papers_release(tmp_path):
    state = long_clip_state()
    named = {}
    for name, v in state.items():
        named["module." + (name if name.startswith(("visual", "logit")) else f"text.{name}")] = v
    optimizer = {"state": {}, "param_groups": [{"lr": 1e-6}]}
    tree = {"epoch": 3, "name": "debias", "state_dict": named, "optimizer": optimizer, "scaler": {"scale": 65536.}}
    file = save(tree, tmp_path/"epoch_3", "pt")
    same_as_open_clip(load_checkpoint(file), merged(state))
    same_as_open_clip(load_checkpoint(file, positions="official"), merged(state, official=True))
    with pytest.raises(ValueError, match="saved"): load_checkpoint(file, positions="base")
    one_table = save(merged(state), tmp_path/"one", "pt")
    with pytest.raises(ValueError, match="one"): load_checkpoint(one_table, "tiny-clip", positions="official")


def test_siglip_state_dict(tmp_path):
    torch.manual_seed(1)
    config = copy.deepcopy(CONFIGS["tiny-siglip"])
    config.pop("custom_text")
    theirs, text = open_clip.CustomTextCLIP(**config), torch.randint(0, 3000, (3, 64))
    file = save({name: v.clone() for name, v in theirs.state_dict().items()}, tmp_path/"m", "safetensors")
    model = load_checkpoint(file)
    assert (model.backbone, model.context_length, model.logit_bias.item()) == ("tiny-siglip", 64, -10)
    assert torch.equal(model.encode_text(text), theirs.encode_text(text))
    long, stretched = create_model("tiny-siglip", file), stretch_positions(theirs.text.positional_embedding)
    assert long.context_length == 196 and torch.equal(long.text.positional_embedding, stretched)


# Hugging Face folders

def hugging_face_clip(folder, length=248, activation="quick_gelu"):
    "transformers' own tiny CLIP, saved into a folder."
    from transformers import CLIPConfig, CLIPModel
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 1, "hidden_act": activation}
    text = sizes | {"num_hidden_layers": 2, "max_position_embeddings": length, "vocab_size": 49408,
                    "eos_token_id": 49407}
    vision = sizes | {"num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    model = CLIPModel(CLIPConfig(projection_dim=16, text_config=text, vision_config=vision)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("length", [77, 248])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
@torch.no_grad()
def test_hugging_face_folder(tmp_path, length, activation):
    theirs = hugging_face_clip(tmp_path, length, activation)
    model, image, text = load_checkpoint(tmp_path).eval(), torch.randn(2, 3, 16, 16), five_captions(length, 3)
    assert model.backbone == ("tiny-clip-quickgelu" if activation == "quick_gelu" else "tiny-clip")
    assert model.context_length == length and model.base_length == 77
    out = theirs(input_ids=text, pixel_values=image)
    images, texts = model.encode_image(image, normalize=True), model.encode_text(text, normalize=True)
    torch.testing.assert_close(images, out.image_embeds, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(texts, out.text_embeds, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path/"config.json").read_text())
    config["text_config"]["num_attention_heads"] = 2
    (tmp_path/"config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="heads"): load_checkpoint(tmp_path)
    (tmp_path/"model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors"): load_checkpoint(tmp_path)


def in_parts(folder):
    "Turns a folder's weights into three files, as `save_pretrained` shards them. Returns the index."
    whole, index = folder/"model.safetensors", folder/"model.safetensors.index.json"
    with safe_open(whole, "pt") as f: state = {name: f.get_tensor(name) for name in f.keys()}
    part_of = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(sorted(state))}
    for part in set(part_of.values()):
        save_file({name: v for name, v in state.items() if part_of[name] == part}, folder/part)
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": part_of}))
    whole.unlink()
    return index, part_of


def test_a_hugging_face_folder_in_parts(tmp_path):
    hugging_face_clip(tmp_path)
    whole = load_checkpoint(tmp_path, "tiny-clip-quickgelu").state_dict()
    index, part_of = in_parts(tmp_path)
    again = load_checkpoint(tmp_path, "tiny-clip-quickgelu").state_dict()
    assert whole.keys() == again.keys() and all(torch.equal(v, again[name]) for name, v in whole.items())
    faults = [
        ({"weight_map": {"a": "../../model.safetensors"}}, "must be .safetensors files beside it"),
        ({"weight_map": {"a": "weights.bin"}}, "must be"),
        ({}, "no index of weights"),
        ({"weight_map": part_of | {"b": "gone.safetensors"}}, "gone.safetensors is missing"),
    ]
    for content, says in faults:
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=says): load_checkpoint(tmp_path, "tiny-clip-quickgelu")


HF_NAMES = {"attn": "self_attn", "ln_1": "layer_norm1", "ln_2": "layer_norm2", "c_fc": "fc1", "c_proj": "fc2"}
HF_STARTS = {
    "ln_pre": "pre_layrnorm", "ln_post": "post_layernorm", "ln_final": "final_layer_norm",
    "class_embedding": "embeddings.class_embedding", "conv1": "embeddings.patch_embedding",
    "positional_embedding": "embeddings.position_embedding.weight", "token_embedding": "embeddings.token_embedding",
}


def hugging_face_names(state):
    "The same tensors under Hugging Face's names, written here a second time."
    out = {"logit_scale": state["logit_scale"], "text_projection.weight": state["text_projection"].T.contiguous(),
           "visual_projection.weight": state["visual.proj"].T.contiguous()}
    for name, v in state.items():
        if name in ("logit_scale", "text_projection", "visual.proj"): continue
        side, name = "vision_model" if name.startswith("visual.") else "text_model", name.removeprefix("visual.")
        if "resblocks" not in name:
            for ours, theirs in HF_STARTS.items():
                if name.startswith(ours): name = name.replace(ours, theirs)
            out[f"{side}.{name}"] = v
            continue
        _, _, i, part = name.split(".", 3)
        for ours, theirs in HF_NAMES.items(): part = part.replace(ours, theirs)
        if "in_proj" not in part: out[f"{side}.encoder.layers.{i}.{part}"] = v
        else:
            for x, third in zip("qkv", v.chunk(3), strict=True):
                out[f"{side}.encoder.layers.{i}.{part.replace('in_proj_', f'{x}_proj.')}"] = third.clone()
    return out


def test_fg_clip_is_read_as_its_long_path(tmp_path):
    state, trained = openai_state(248), torch.randn(248, 64)*.1
    named, place = hugging_face_names(state), "text_model.embeddings.position_embedding"
    named |= {
        f"{place}_ori.weight": named.pop(f"{place}.weight"),
        f"{place}_res.weight": trained,
        f"{place}.weight": torch.randn(77, 64),
        "logit_scale_finegraind": torch.tensor(1.),
        "logit_scale_hardneg": torch.tensor(1.),
        "text_filip_projection.weight": named.pop("text_projection.weight"),
        "text_projection.weight": torch.randn(16, 64),
    }
    save_file(named, tmp_path/"model.safetensors")
    part = {"num_attention_heads": 1, "hidden_act": "quick_gelu"}
    (tmp_path/"config.json").write_text(json.dumps({"text_config": part, "vision_config": part}))
    same_as_open_clip(load_checkpoint(tmp_path), merged(state | {"positional_embedding_res": trained}))


@pytest.mark.parametrize("kind", ["siglip", "siglip2"])
def test_a_siglip_folder_of_transformers_is_refused_with_its_reason(tmp_path, kind):
    (tmp_path/"config.json").write_text(json.dumps({"model_type": kind}))
    save_file({"logit_scale": torch.zeros(1)}, tmp_path/"model.safetensors")
    with pytest.raises(ValueError, match=f"{kind} model of transformers, and those are not read back"):
        load_checkpoint(tmp_path)


# every tensor

def test_every_tensor_must_match(tmp_path):
    state = openai_state()
    state["visual.proj"], state["extra.weight"] = torch.randn(64, 17), torch.ones(1)
    del state["ln_final.bias"], state["transformer.resblocks.1.ln_2.weight"]
    file = save(state, tmp_path/"m", "pt")
    with pytest.raises(ValueError) as e: load_checkpoint(file, "tiny-clip")
    for part in ("2 missing: ", "ln_final.bias", "transformer.resblocks.1.ln_2.weight", "1 unexpected: extra.weight",
                 "1 misshaped: visual.proj [64, 17], not [64, 16]", "nothing was loaded"):
        assert part in str(e.value)
    with pytest.raises(ValueError, match="No backbone"): load_checkpoint(file)


def test_a_prefix_nobody_knows_matches_nothing_and_says_so(tmp_path):
    file = save(prefixed("clip.", openai_state()), tmp_path/"w", "pt")
    with pytest.raises(ValueError, match="missing"): load_checkpoint(file, "tiny-clip")
    with pytest.raises(ValueError, match="known"): load_checkpoint(file)


@pytest.mark.parametrize("tree,says", [([1, 2], "list"), ({"epoch": 1}, "epoch"), ({}, "state dict")])
def test_a_file_without_a_state_dict(tmp_path, tree, says):
    with pytest.raises(ValueError, match=says): load_checkpoint(save(tree, tmp_path/"t", "pt"), "tiny-clip")


@pytest.mark.parametrize("name", ["ViT-L-14-336-quickgelu", "ViT-B-16-SigLIP2"])
def test_real_architectures_are_found_by_their_shapes(name):
    with torch.device("meta"): state = create_model(name).state_dict()
    assert find_backbone(state, name.endswith("quickgelu"), "file") == name
    if "SigLIP" in name: return
    with pytest.raises(ValueError, match=name): find_backbone(state, None, "file")


# files that are not what they should be

class Bomb:
    def __init__(self, target): self.target = str(target)
    def __reduce__(self): return os.mkdir, (self.target,)


@pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated", "ignore:Detected pickle protocol")
def test_a_malicious_pickle_is_refused(tmp_path):
    mark, legacy, plain = tmp_path/"code-ran", tmp_path/"legacy.pt", tmp_path/"plain.pt"
    file = save({"weight": torch.zeros(1), "bomb": Bomb(mark)}, tmp_path/"m", "pt")
    with pytest.raises(ValueError, match="refused.*safetensors"): load_checkpoint(file, "tiny-clip")
    torch.save({"state_dict": Bomb(mark)}, legacy, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="refused"): load_checkpoint(legacy, "tiny-clip")
    with zipfile.ZipFile(file, "a") as z: z.writestr("archive/code/__torch__.py", "x = 1.702")   # as TorchScript has
    with pytest.raises(ValueError, match="cannot be read|refused"): load_checkpoint(file, "tiny-clip")
    plain.write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError): load_checkpoint(plain, "tiny-clip")
    assert not mark.exists()
    pickle.loads(plain.read_bytes())
    assert mark.exists()                                             # it would have worked


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("part", [.5, .999, 0])
def test_a_checkpoint_cut_in_half(tmp_path, kind, part):
    file = save(openai_state(vocab=100), tmp_path/"m", kind)
    content = file.read_bytes()
    file.write_bytes(content[:int(len(content)*part)])
    with pytest.raises(ValueError, match=file.name): load_checkpoint(file, "tiny-clip")
    with pytest.raises(ValueError, match="no checkpoint file"): load_checkpoint(tmp_path/"none.pt", "tiny-clip")


# out

@pytest.mark.parametrize("backbone,length,keep", [
    ("tiny-clip", None, 20), ("tiny-siglip", 100, 12), ("scenes-gelu", 96, 8), ("tiny-causal", 77, 20)])
def test_saved_models_come_back_whole(tmp_path, backbone, length, keep):
    model = create_model(backbone, context_length=length, keep=keep)
    file = save_checkpoint(model, tmp_path/"new"/"m.safetensors", recipe="debias", steps=3)
    again = load_checkpoint(file)
    state = again.state_dict()
    assert type(again) is type(model) and all(torch.equal(v, state[name]) for name, v in model.state_dict().items())
    for name in ("backbone", "family", "context_length", "base_length", "keep", "stretch_factor"):
        assert getattr(again, name) == getattr(model, name)
    with safe_open(file, "pt") as f: noted = f.metadata()
    told = {"recipe": "debias", "steps": "3", "backbone": backbone, "context_length": str(model.context_length)}
    assert noted | told == noted and [p.name for p in file.parent.iterdir()] == ["m.safetensors"]


def test_a_wrong_length_or_backbone_on_reload_is_said(tmp_path):
    file = save_checkpoint(create_model("tiny-clip"), tmp_path/"m.safetensors")
    for length in (None, 248): assert create_model("tiny-clip", file, length).context_length == 248
    for length in (77, 256):
        with pytest.raises(ValueError, match=f"77 to 248 .*{length}"): create_model("tiny-clip", file, length)
    with pytest.raises(ValueError, match="tiny-clip, not tiny-clip-quickgelu"):
        load_checkpoint(file, "tiny-clip-quickgelu")
    with safe_open(file, "pt") as f: state, noted = {name: f.get_tensor(name) for name in f.keys()}, f.metadata()
    save_file(state, file, noted | {"context_length": "196"})
    with pytest.raises(ValueError, match="context_length=196"): load_checkpoint(file)


def test_a_stretched_file_needs_no_keep(tmp_path):
    "The file says its own: the default of 20 rows, too many for 16 positions, is not asked for."
    small = {"tiny-short": CLIP | {"text_cfg": CLIP["text_cfg"] | {"context_length": 16}}}
    (tmp_path/"configs").mkdir()
    with registered(small, tmp_path/"configs"):
        model = create_model("tiny-short", keep=4)
        file = save_checkpoint(model, tmp_path/"m.safetensors")
        assert create_model("tiny-short", file).keep == 4
        with pytest.raises(ValueError, match="such as keep=4"): create_model("tiny-short")


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    model = create_model("tiny-clip")
    file = save_checkpoint(model, tmp_path/"m.safetensors")
    content = file.read_bytes()
    def dies(tensors, path, metadata):
        path.write_bytes(content[:100])
        raise OSError("No space left on device")
    monkeypatch.setattr(checkpoints, "save_file", dies)
    with pytest.raises(OSError, match="space"): save_checkpoint(model, file)
    assert file.read_bytes() == content and [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
    with pytest.raises(ValueError, match="safetensors"): save_checkpoint(model, tmp_path/"m.pt")


def test_prefix_pads_come_through(tmp_path):
    "What is saved reads its rows as before, pads and all."
    model = create_model("tiny-clip").eval()
    again = load_checkpoint(save_checkpoint(model, tmp_path/"m.safetensors")).eval()
    rows = captions([5, 30, 9], [0, 100, 3])
    with torch.no_grad(): assert torch.equal(encode_texts(model, rows), encode_texts(again, rows))
