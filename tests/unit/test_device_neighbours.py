"""The CPU workarounds leave the rest of the process as it was: other libraries use torch beside Megatron-Core."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_kd.device import select_device
from megatron_kd.errors import ConfigError
from tests.assets import ROOT, environment


@pytest.fixture(autouse=True, scope="module")
def _patched() -> None:
    select_device("cpu")


FACTORIES = {
    "tensor": ([1.0],),
    "zeros": (2,),
    "empty": (2,),
    "ones": (2,),
    "full": ((2,), 1.0),
    "arange": (2,),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_honour_every_device_but_cuda(name: str) -> None:
    factory, arguments = getattr(torch, name), FACTORIES[name]
    assert factory(*arguments).device.type == "cpu"
    assert factory(*arguments, device="meta").device.type == "meta"
    for device in ("cuda", "cuda:3", torch.device("cuda", 0)):
        assert factory(*arguments, device=device).device.type == "cpu"
    assert factory(*arguments, device=None, dtype=torch.float64).dtype == torch.float64
    with torch.device("meta"):
        assert factory(*arguments).device.type == "meta"
        assert factory(*arguments, device="cpu").device.type == "cpu"
    assert pickle.loads(pickle.dumps(factory)) is factory


def test_models_of_transformers_load_as_ever(tmp_path: Path) -> None:
    """from_pretrained builds on the meta device: what it filled wrongly would be garbage."""
    from transformers import LlamaForCausalLM

    from tests.models_oracles import grouped_model, random_hf_model

    built = random_hf_model(grouped_model())
    built.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    for (name, ours), theirs in zip(built.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    tokens = torch.arange(12)[None]
    assert torch.equal(built(tokens).logits, loaded.eval()(tokens).logits) or torch.allclose(
        built(tokens).logits, loaded(tokens).logits, atol=1e-5
    )


def test_types_convert_as_ever() -> None:
    half, double = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.float64)
    assert half.type(torch.float64).dtype == torch.float64
    assert half.type("torch.DoubleTensor").dtype == torch.float64
    assert half.type(double.type()).dtype == torch.float64
    assert half.type(double.type()).device.type == "cpu"


def test_transforms_and_pickles_work() -> None:
    batched = torch.vmap(lambda x: x + torch.arange(3) + torch.zeros(3, device="cuda"))(torch.ones(4, 3))
    assert batched.tolist() == [[1, 2, 3]] * 4
    assert pickle.loads(pickle.dumps(torch.ones(2))).tolist() == [1, 1]
    gradient = torch.func.grad(lambda x: (x * torch.ones(3)).sum())(torch.ones(3))
    assert gradient.tolist() == [1, 1, 1]
    assert torch.export.export(_Adds(), (torch.ones(3),)).module()(torch.ones(3)).tolist() == [1, 2, 3]


class _Adds(torch.nn.Module):
    """A module that calls a factory in its forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(3)


def test_a_gpu_that_is_not_there_is_refused_and_nothing_is_patched() -> None:
    script = """
import torch
before = {name: getattr(torch, name) for name in ("zeros", "arange", "tensor")} | {
    "cuda": torch.Tensor.cuda, "type": torch.Tensor.type, "stream": torch.cuda.Stream,
    "device": torch.cuda.current_device, "synchronize": torch.cuda.synchronize,
}
from megatron_kd.device import current_device, select_device
from megatron_kd.device import cpu_megatron
from megatron_kd.errors import ConfigError
try:
    select_device("h200")
except ConfigError as error:
    assert "sees no CUDA device" in str(error), error
else:
    raise SystemExit("accepted")
after = {name: getattr(torch, name) for name in ("zeros", "arange", "tensor")} | {
    "cuda": torch.Tensor.cuda, "type": torch.Tensor.type, "stream": torch.cuda.Stream,
    "device": torch.cuda.current_device, "synchronize": torch.cuda.synchronize,
}
assert before == after and not cpu_megatron._applied
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment() | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_process_keeps_its_device() -> None:
    with pytest.raises(ConfigError, match="h100"):
        select_device("h100")
    assert torch.zeros(1, device="cuda").device.type == "cpu"
