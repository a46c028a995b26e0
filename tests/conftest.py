"""Fixtures that several test files share."""
import json

import diagnosed
import open_clip
import pytest

PARITY = {
    "embed_dim": 64, "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 128, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 1000, "width": 128, "heads": 2, "layers": 2},
}
WORDS = "a an the small large red green blue circle square is at in on top of left right there with and two dog " \
        "redbrick house".split()
LETTERS = "▁abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="session")
def parity_backbone(tmp_path_factory):
    "Name of the golden values' architecture; registered once, since a second name would make its shapes ambiguous."
    file = tmp_path_factory.mktemp("config")/"parity-tiny.json"
    file.write_text(json.dumps(PARITY))
    open_clip.add_model_config(file)
    return file.stem


def save_tokenizer(raw, folder, **marks):
    from transformers import PreTrainedTokenizerFast
    PreTrainedTokenizerFast(tokenizer_object=raw, **marks).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def siglip_pieces(tmp_path_factory):
    "A tokeniser of SigLIP's kind (T5): unigram pieces, every word behind ▁, pad = eos = 1."
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    vocab = [("<pad>", 0.), ("</s>", 0.), ("<unk>", 0.)] + [(c, -9.) for c in LETTERS + "0123456789"]
    vocab += [("▁" + w, -3.) for w in WORDS if w != "a"] + [("▁a", -2.)]
    raw = Tokenizer(models.Unigram(vocab, unk_id=2))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder = tmp_path_factory.mktemp("siglip")
    return save_tokenizer(raw, folder, eos_token="</s>", pad_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="session")
def siglip2_pieces(tmp_path_factory):
    "A tokeniser of SigLIP2's kind (Gemma): spaces become ▁ and the first word has none, pad 0, eos 1."
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    vocab, merges = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}, []
    for letter in LETTERS: vocab.setdefault(letter, len(vocab))
    for word in [before + w for w in WORDS for before in ("", "▁")]:
        for k in range(2, len(word) + 1):
            if word[:k] in vocab: continue
            vocab[word[:k]] = len(vocab)
            merges.append((word[:k - 1], word[k - 1]))
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True))
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    marks = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>"}
    return save_tokenizer(raw, tmp_path_factory.mktemp("siglip2"), **marks)


# What several files ask of a diagnosis

@pytest.fixture(scope="session")
def world(): return diagnosed.world()


@pytest.fixture(scope="session")
def one(): return diagnosed.diagnosis("one")


@pytest.fixture(scope="session")
def siglip(): return diagnosed.diagnosis("a SigLIP")
