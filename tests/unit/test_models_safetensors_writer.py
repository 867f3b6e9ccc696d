"""Files written a tensor at a time, read by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from megatron_kd.models.safetensors_writer import ShardedWriter

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TENSORS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.integers(1, 400))
def test_what_was_added_is_read_back(listed: list[tuple[torch.dtype, list[int], bool]], limit: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = {f'"{i}".é': torch.randn(shape).to(dtype) for i, (dtype, shape, _) in enumerate(listed)}
        with ShardedWriter(folder, list(wanted), limit) as writer:
            for (_, _, in_slices), (key, tensor) in zip(listed, wanted.items(), strict=True):
                writer.add(key, iter(tensor if in_slices else [tensor]), len(tensor) if in_slices else None)
        files = sorted(file.name for file in folder.glob("*.safetensors"))
        assert files == sorted(writer.files())
        assert writer.parameters == sum(tensor.numel() for tensor in wanted.values())
        found: dict[str, torch.Tensor] = {}
        for file in files:
            with safe_open(folder / file, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}
                held = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a dictionary
            assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= limit
            found |= held
            if len(files) > 1:
                index = json.loads((folder / "model.safetensors.index.json").read_text())
                assert held.keys() == {key for key, there in index["weight_map"].items() if there == file}
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor)
        assert len(list(folder.iterdir())) == len(files) + (len(files) > 1)


def test_slices_that_differ_are_refused_and_nothing_gets_its_name(tmp_path: Path) -> None:
    for slices in ([torch.zeros(2), torch.zeros(3)], [torch.zeros(2)], [torch.zeros(2), torch.zeros(2).half()]):
        with pytest.raises(ValueError, match="x: "), ShardedWriter(tmp_path, ["x"], 100) as writer:
            writer.add("x", iter(slices), 2)
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(".")
        left.unlink()
