"""Model files of mlpredict, built as they are written."""

import json

import pytest

from forerun.base.errors import ModelBuildError, UnknownModelError
from forerun.tracing.models.sources import build_model

CONV = {
    "type": "Convolution",
    "kernelsize": 3,
    "channels_out": 64,
    "strides": 1,
    "use_bias": 1,
    "activation": "relu",
}


def written(tmp_path, *layers, size=224, channels=3):
    path = tmp_path / "net.json"
    numbered = {str(number): layer for number, layer in enumerate(layers, start=1)}
    path.write_text(json.dumps({"input": {"dimension": channels, "size": size}, "layers": numbered}))
    return f"mlpredict:{path}"


def test_the_file_is_built_with_its_sizes(tmp_path):
    spec = written(
        tmp_path,
        {**CONV, "padding": "SAME"},
        {"type": "Max_pool", "pool_size": 2, "strides": 2, "padding": "SAME"},
        {**CONV, "padding": "VALID", "strides": 2, "channels_out": 8},
        {"type": "Fully_connected", "neurons": "10", "activation": "softmax"},
    )
    built = build_model(spec)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in built.module]
    # 3x3x3x64 + 64; 3x3x64x8 + 8; after the window (112 - 3) // 2 + 1 = 55 pixels: 8x55x55x10 + 10
    assert [count for count in counts if count] == [1792, 4616, 242_010]
    assert build_model(spec, image_size=32).input_shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (
            {**CONV, "type": "Convolutionn", "padding": "SAME"},
            "layer 1: unknown type 'Convolutionn'; did you mean convolution",
        ),
        ({**CONV, "padding": "some"}, "padding 'some' is missing or impossible"),
        ({"type": "Convolution", "padding": "SAME"}, "'kernelsize' is missing"),
        ({**CONV, "padding": "SAME", "activation": "rely"}, "unknown activation 'rely'; did you mean relu"),
        ({**CONV, "padding": "VALID", "kernelsize": 300}, "smaller than its window"),
    ],
)
def test_what_is_wrong_with_a_layer_is_said(tmp_path, layer, told):
    with pytest.raises(ModelBuildError, match=told):
        build_model(written(tmp_path, layer))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UnknownModelError, match="there is no file"):
        build_model(f"mlpredict:{tmp_path}/none.json")
    (tmp_path / "other.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelBuildError, match="expected a model file of mlpredict"):
        build_model(f"mlpredict:{tmp_path}/other.json")
