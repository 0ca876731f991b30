"""Our classes in place of those of transformers, by its `register_patch_mapping`: loading,
computing and saving under its names."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="an extra of its own")
patching = pytest.importorskip("transformers.monkey_patching", reason="transformers >= 5.2 has it")

from hf_models import assert_all_close, computed, perturbed  # noqa: E402

import warpweave  # noqa: E402
from warpweave.compat.liger import LigerSwiGLUMLP  # noqa: E402

CLASSES = {"LlamaRMSNorm": warpweave.RMSNorm, "LlamaMLP": LigerSwiGLUMLP}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_classes_are_swapped_while_a_model_loads_and_it_saves_what_it_read(tmp_path):
    model = perturbed("llama")
    model.save_pretrained(tmp_path / "theirs")
    patching.register_patch_mapping(CLASSES)
    try:
        ours = type(model).from_pretrained(tmp_path / "theirs")
    finally:
        patching.unregister_patch_mapping(list(CLASSES))
    kinds = [type(m) for m in ours.modules()]
    assert kinds.count(warpweave.RMSNorm) == 5
    assert kinds.count(LigerSwiGLUMLP) == 2
    assert_all_close(computed(ours), computed(model))
    ours.save_pretrained(tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(again[name], x) for name, x in model.state_dict().items())
