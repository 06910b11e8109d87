"""Two predictions side by side."""

import pytest

import forerun
from forerun.base.errors import UsageError
from forerun.prediction.comparison import compare_answers


@pytest.fixture(scope="module")
def pair():
    both = {"dataset": "cifar10", "epochs": 2, "price_usd_per_hour": 1.0}
    return (
        forerun.predict("cnn", device="t4", batch_size=32, **both),
        forerun.predict("cnn", device="t4", batch_size=65536, **both),
    )


def test_the_changes_of_the_parts_add_up_to_that_of_the_whole(pair):
    found = pair[0].compare(pair[1])
    quantities = {item.name: item for item in found.quantities}
    for whole, parts in (("step_time_s", found.time_parts), ("peak_memory_bytes", found.memory_parts)):
        change = quantities[whole].after - quantities[whole].before
        assert sum(part.after - part.before for part in parts) == pytest.approx(change, rel=1e-6)


def test_the_words_say_what_changed_and_that_it_no_longer_fits(pair):
    found = pair[0].compare(pair[1])
    assert [(item.name, item.before, item.after) for item in found.settings] == [("batch_size", 32, 65536)]
    assert "no longer fits the NVIDIA T4" in found.sentences
    assert any(
        sentence.startswith("memory: ") and "activations +" in sentence for sentence in found.sentences
    )


def test_a_run_beside_itself_does_not_change(pair):
    found = pair[0].compare(pair[0])
    assert not found.settings
    assert all(item.change == 0 for item in found.quantities)


def test_another_document_is_refused():
    with pytest.raises(UsageError, match="expected two answers"):
        compare_answers({"a": 1}, {})
