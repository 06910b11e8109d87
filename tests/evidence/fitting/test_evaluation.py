import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.adapters.classics.baselines import NonNegativeSums, Roofline
from forerun.base.errors import RecordError
from forerun.evidence.fitting.evaluation import (
    ErrorMetrics,
    Split,
    canonical_network,
    configuration_of,
    cross_validated_predictions,
    errors,
    family_folds,
    grouped_errors,
    leave_one_group_out,
)
from forerun.evidence.records.step_record import StepRecord
from forerun.question.setup import Phase, Precision
from regressor_cases import lawful_times_s, random_features
from studies.tables.public import FOLDER_VARIABLE, reference_folder
from studies.tables.published import read_timm_train, read_torchvision

positive = st.floats(1e-3, 1e3)


def measured(row: int, model: str, family: str, device: str = "rtx-3090", batch: int = 64) -> StepRecord:
    return StepRecord(
        source="cases", row_id=str(row), model=model, family=family, device=device,
        batch_size_per_device=batch, step_time_s=0.1, precision=Precision.AMP, phase=Phase.TRAIN,
    )  # fmt: skip


MIXED = [
    measured(i, f"{family}{size}", family, device)
    for i, (family, size, device) in enumerate(
        (family, size, device)
        for family in ("resnet", "vgg", "densenet", "mixer", "vit", "dla", "xcit")
        for size in (18, 50)
        for device in ("rtx-3090", "t4", "a10")
    )
]


def check_is_partition(splits: tuple[Split, ...], num_rows: int) -> None:
    for split in splits:
        assert split.test.size
        assert np.intersect1d(split.fit, split.test).size == 0
        assert len(split.fit) + len(split.test) == num_rows
    np.testing.assert_array_equal(np.sort(np.concatenate([s.test for s in splits])), np.arange(num_rows))


class TestSplits:
    def test_no_family_is_on_both_sides(self):
        splits = family_folds(MIXED, k=3)
        check_is_partition(splits, len(MIXED))
        for split in splits:
            assert not {MIXED[i].family for i in split.fit} & {MIXED[i].family for i in split.test}

    def test_folds_are_balanced_and_repeatable(self):
        sizes = [len(split.test) for split in family_folds(MIXED, k=3, seed=1)]
        assert max(sizes) - min(sizes) <= 6
        again = family_folds(MIXED, k=3, seed=1)
        for one, other in zip(family_folds(MIXED, k=3, seed=1), again, strict=True):
            np.testing.assert_array_equal(one.test, other.test)

    def test_the_seed_changes_the_folds(self):
        tests = {
            tuple(map(tuple, (s.test for s in family_folds(MIXED, k=3, seed=seed)))) for seed in range(5)
        }
        assert len(tests) > 1

    def test_order_of_the_rows_does_not_decide_the_folds(self):
        forward = {frozenset(MIXED[i].row_id for i in s.test) for s in family_folds(MIXED, k=3)}
        turned = MIXED[::-1]
        assert {frozenset(turned[i].row_id for i in s.test) for s in family_folds(turned, k=3)} == forward

    def test_devices(self):
        splits = leave_one_group_out([r.device for r in MIXED], "device")
        check_is_partition(splits, len(MIXED))
        assert [split.name for split in splits] == ["a10", "rtx-3090", "t4"]
        for split in splits:
            assert {MIXED[i].device for i in split.test} == {split.name}
            assert split.name not in {MIXED[i].device for i in split.fit}

    def test_configurations_keep_repetitions_and_variants_together(self):
        records = [
            measured(0, "resnet50", "resnet"),
            measured(1, "ssl_resnet50", "resnet"),
            measured(2, "resnet50", "resnet", batch=32),
            measured(3, "resnet50", "resnet", device="t4"),
        ]
        splits = leave_one_group_out([configuration_of(r) for r in records])
        check_is_partition(splits, 4)
        assert sorted(tuple(split.test) for split in splits) == [(0, 1), (2,), (3,)]

    def test_variants_count_once(self):
        records = [
            measured(0, "timm:resnet50", "resnet"),
            measured(1, "timm:swsl_resnet50", "resnet"),
            measured(2, "timm:resnet50d", "resnet"),
        ]
        assert len({configuration_of(record) for record in records}) == 2

    def test_too_little_to_split(self):
        with pytest.raises(RecordError, match=r"number of families \(1\), got 5"):
            family_folds([measured(0, "resnet50", "resnet")])
        with pytest.raises(RecordError, match="between 2"):
            family_folds(MIXED, k=1)
        with pytest.raises(RecordError, match="at least two devices"):
            leave_one_group_out([r.device for r in MIXED[::3]], "device")
        with pytest.raises(RecordError, match="at least two configurations"):
            leave_one_group_out([configuration_of(r) for r in MIXED[:1]])


class TestErrors:
    def test_by_hand(self):
        found = errors([1.1, 1.0, 4.0], [1.0, 2.0, 4.0])
        assert found.n == 3
        assert found.mape == pytest.approx((0.1 + 0.5) / 3)
        assert found.median_ape == pytest.approx(0.1)
        assert found.p90_ape == pytest.approx(0.42)
        assert found.mae == pytest.approx(1.1 / 3)
        assert found.rmse == pytest.approx(math.sqrt((0.01 + 1) / 3))
        assert found.r2 == pytest.approx(1 - 1.01 / (14 / 3))
        assert found.coverage_90 is None

    def test_fields_are_those_of_the_report(self):
        assert [field.name for field in dataclasses.fields(ErrorMetrics)] == [
            "n", "mape", "median_ape", "p90_ape", "rmse", "mae", "r2", "coverage_90",
        ]  # fmt: skip

    @given(st.lists(positive, min_size=1, max_size=30))
    def test_perfect_predictions(self, values):
        found = errors(values, values)
        assert (found.mape, found.median_ape, found.p90_ape, found.rmse, found.mae) == (0, 0, 0, 0, 0)
        assert found.r2 in (None, 1.0)

    @given(st.lists(st.tuples(positive, positive), min_size=1, max_size=30), st.floats(0.1, 10))
    def test_relative_errors_do_not_depend_on_the_unit(self, pairs, unit):
        guess, truth = np.array(pairs).T
        one, other = errors(guess, truth), errors(guess * unit, truth * unit)
        assert one.mape == pytest.approx(other.mape)
        assert one.rmse * unit == pytest.approx(other.rmse)
        assert one.mae <= one.rmse * (1 + 1e-9)
        assert one.median_ape <= one.p90_ape * (1 + 1e-9)

    def test_the_mean_as_prediction_explains_nothing(self):
        assert errors([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]).r2 == pytest.approx(0)
        assert errors([2.0], [1.0]).r2 is None

    def test_coverage(self):
        found = errors([1.0, 2.0], [1.0, 2.0], ([0.5, 2.5], [1.5, 3.0]))
        assert found.coverage_90 == 0.5

    def test_groups_are_the_errors_of_their_rows(self):
        guess, truth = np.array([1.1, 2.0, 3.3]), np.array([1.0, 2.0, 3.0])
        bounds = (guess * 0.99, guess * 1.01)
        found = grouped_errors(guess, truth, ["t4", "a10", "t4"], bounds)
        assert list(found) == ["a10", "t4"]
        assert found["t4"] == errors(guess[[0, 2]], truth[[0, 2]], (bounds[0][[0, 2]], bounds[1][[0, 2]]))
        assert sum(part.n * part.mape for part in found.values()) == pytest.approx(
            3 * errors(guess, truth).mape
        )

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
    def test_impossible_measurements_are_refused(self, bad):
        with pytest.raises(RecordError, match=r"above zero.*row 2"):
            errors([1.0, 1.0], [1.0, bad])

    def test_other_bad_input(self):
        with pytest.raises(RecordError, match=r"predictions must be finite.*row 1"):
            errors([float("nan")], [1.0])
        with pytest.raises(RecordError, match="as many predictions"):
            errors([1.0, 2.0], [1.0])
        with pytest.raises(RecordError, match="at least one"):
            errors([], [])
        with pytest.raises(RecordError, match="one group per row"):
            grouped_errors([1.0], [1.0], [])


class Memoriser:
    """Knows the times of the rows it was fitted on and answers one second for all others."""

    def fit(self, features, step_time_s):
        self._known = dict(zip(features.flops, step_time_s, strict=True))

    def predict(self, features):
        return np.array([self._known.get(flops, 1.0) for flops in features.flops])


class TestCrossValidation:
    SPLITS = tuple(
        Split(name=str(i), fit=np.setdiff1d(np.arange(60), np.arange(i, 60, 4)), test=np.arange(i, 60, 4))
        for i in range(4)
    )

    def test_no_row_is_predicted_by_a_fit_that_saw_it(self):
        features = random_features(60)
        found = cross_validated_predictions(Memoriser, features, lawful_times_s(features), self.SPLITS)
        np.testing.assert_array_equal(found, 1.0)

    def test_predictions_come_back_in_the_order_of_the_rows(self):
        features = random_features(60)
        found = cross_validated_predictions(Roofline, features, lawful_times_s(features), self.SPLITS)
        np.testing.assert_array_equal(found, Roofline().predict(features))

    def test_a_law_is_found_out_of_fold(self):
        features = random_features(60)
        times = lawful_times_s(features)
        found = cross_validated_predictions(NonNegativeSums, features, times, self.SPLITS)
        assert errors(found, times).mape < 1e-6

    @pytest.mark.parametrize("splits", [SPLITS[:3], (*SPLITS, SPLITS[0]), ()])
    def test_splits_must_test_every_row_once(self, splits):
        features = random_features(60)
        with pytest.raises(RecordError, match="exactly once"):
            cross_validated_predictions(Roofline, features, lawful_times_s(features), splits)


@pytest.mark.reference
class TestOnPublicTables:
    @pytest.fixture(scope="class")
    def folder(self):
        found = reference_folder()
        if found is None:
            pytest.skip(f"public tables absent: set {FOLDER_VARIABLE} to their folder")
        return found

    def test_families_of_timm_are_split_evenly_and_apart(self, folder):
        records = read_timm_train(folder)
        splits = family_folds(records)
        check_is_partition(splits, 1249)
        assert max(len(s.test) for s in splits) - min(len(s.test) for s in splits) < 25
        for split in splits:
            assert not {records[i].family for i in split.fit} & {records[i].family for i in split.test}
            networks = [
                {canonical_network(records[i].model) for i in rows} for rows in (split.fit, split.test)
            ]
            assert not networks[0] & networks[1]

    def test_variants_of_timm_count_once(self, folder):
        assert 950 < len({configuration_of(record) for record in read_timm_train(folder)}) < 1200

    def test_devices_of_the_torchvision_rows_are_apart(self, folder):
        records = read_torchvision(folder)
        splits = leave_one_group_out([r.device for r in records], "device")
        check_is_partition(splits, len(records))
        assert len(splits) == 8
