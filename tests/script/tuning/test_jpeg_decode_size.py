"""JPEGs are decoded at a smaller scale in a script that knows nothing of it."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

import forerun
from forerun.script.tuning.configuration import ScriptConfiguration

SCRIPT = """
import sys
from PIL import Image
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        print(Image.open(file).convert("RGB").size)
"""


@pytest.mark.parametrize(
    ("size", "seen"),
    [(0, "(640, 480)"), (480, "(640, 480)"), (240, "(320, 240)"), (100, "(160, 120)"), (1, "(80, 60)")],
)
def test_the_smallest_scale_that_keeps_the_size_is_decoded(tmp_path, size, seen):
    (tmp_path / "train.py").write_text(SCRIPT)
    picture = Image.fromarray(np.zeros((480, 640, 3), np.uint8))
    picture.save(tmp_path / "a.jpg")
    picture.save(tmp_path / "b.png")
    said, output = [], io.StringIO()
    command = [sys.executable, *(str(tmp_path / name) for name in ("train.py", "a.jpg", "b.png"))]
    configuration = ScriptConfiguration(arguments={}, hooks={"jpeg_decode_size": size})
    forerun.apply(command, configuration, say=said.append, echo=output)
    assert output.getvalue().splitlines() == [seen, "(640, 480)"]
    assert any("jpeg_decode_size: PIL.Image.open" in line for line in said) == (size > 0)
