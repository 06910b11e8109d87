"""The public tables, read for real where they are present."""

from collections import Counter

import pandas as pd
import pytest

from forerun.base.errors import RecordError, UnknownDeviceError
from forerun.evidence.records.model_names import canonical_network, model_family
from forerun.question.setup import OptimizerImplementation, Phase, Precision
from studies.tables.public import FOLDER_VARIABLE, reference_folder
from studies.tables.published import read_lambda_resnet50, read_timm_infer, read_timm_train, read_torchvision
from studies.tables.transformers import read_neusight_e2e, transformer_config

_ROW = {
    "model": "resnet50", "family": "resnet", "gpu": "RTX-3090", "dtype": "amp_fp16", "layout": "NCHW",
    "compiler": "eager", "torch_version": "1.12", "batch_size": 64, "img_size": 224,
    "time_ms_step": 100.0, "param_count_millions": 25.56, "next_larger_batch_failed": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder():
    found = reference_folder()
    if found is None:
        pytest.skip(f"public tables absent: set {FOLDER_VARIABLE} to their folder")
    return found


@pytest.fixture(scope="module")
def timm_train(folder):
    return read_timm_train(folder)


@pytest.fixture(scope="module")
def timm_infer(folder):
    return read_timm_infer(folder)


def test_folder_named_by_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert reference_folder() == tmp_path
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(RecordError, match="no folder"):
        reference_folder()


def test_folder_beside_the_repository(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    inside = tmp_path / "repository" / "src"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    (tmp_path / "repository" / "pyproject.toml").touch()
    assert reference_folder() is None
    beside = tmp_path / "shared" / "data"
    beside.mkdir(parents=True)
    assert reference_folder() == beside


def test_unknown_device_is_named(tmp_path):
    pd.DataFrame([_ROW | {"gpu": "RTX 9999"}]).to_parquet(tmp_path / "timm_train.parquet")
    with pytest.raises(UnknownDeviceError, match="RTX 9999"):
        read_timm_train(tmp_path)


def test_a_repeated_row_and_a_bad_time_in_a_reference_table(tmp_path):
    pd.DataFrame([_ROW, _ROW]).to_parquet(tmp_path / "timm_train.parquet")
    with pytest.raises(RecordError, match=r"timm_train\.parquet, row 2: model=resnet50.*twice"):
        read_timm_train(tmp_path)
    pd.DataFrame([_ROW, _ROW | {"layout": "NHWC", "time_ms_step": float("nan")}]).to_parquet(
        tmp_path / "timm_train.parquet"
    )
    with pytest.raises(RecordError, match="'time_ms_step', row 2"):
        read_timm_train(tmp_path)
    pd.DataFrame([_ROW | {"dtype": "int8"}]).to_parquet(tmp_path / "timm_train.parquet")
    with pytest.raises(RecordError, match=r"'dtype': expected one of.*'int8'"):
        read_timm_train(tmp_path)


@pytest.mark.reference
class TestTimm:
    def test_training_rows(self, timm_train):
        assert len(timm_train) == 1249
        assert Counter(str(record.layout) for record in timm_train) == {"nchw": 626, "nhwc": 623}
        assert len({record.model for record in timm_train}) == 626
        assert len({record.family for record in timm_train}) == 79
        assert {record.device for record in timm_train} == {"rtx-3090"}
        assert {record.precision for record in timm_train} == {Precision.AMP}
        # 282 rows ran at 512, the first size the script tries.
        assert sum(record.next_larger_batch_failed is None for record in timm_train) == 282

    def test_times_agree_with_the_figures_of_the_readme(self, timm_train):
        times = sorted(record.step_time_s for record in timm_train)
        assert (times[0], times[-1]) == (pytest.approx(0.044, abs=5e-4), pytest.approx(5.06, abs=5e-3))
        assert times[len(times) // 2] == pytest.approx(0.392, abs=5e-4)

    def test_circumstances_of_pytorch_1_12(self, timm_train):
        setup = timm_train[0].training_setup()
        assert setup.optimizer == "nesterov"
        assert setup.optimizer_implementation is OptimizerImplementation.FOR_LOOP
        assert setup.autocast_backward
        assert not setup.fused_attention
        assert not setup.zero_grad_to_none

    def test_family_column_is_reproduced_on_every_row(self, timm_train, timm_infer):
        for records in (timm_train, timm_infer):
            assert [r for r in records if model_family(r.model) != r.family] == []

    def test_a_network_belongs_to_one_family(self, timm_train):
        families = {}
        for record in timm_train:
            families.setdefault(canonical_network(record.model), set()).add(record.family)
        assert {name: found for name, found in families.items() if len(found) > 1} == {}

    def test_variants_of_a_network_take_the_same_time(self, timm_train):
        """Same weights or not, a network measured again differs by the repeat noise only."""
        groups = {}
        for record in timm_train:
            key = (
                canonical_network(record.model), record.layout, record.batch_size_per_device,
                record.image_size,
            )  # fmt: skip
            groups.setdefault(key, []).append(record.step_time_s)
        repeated = [times for times in groups.values() if len(times) > 1]
        assert len(repeated) > 100
        assert max(max(times) / min(times) for times in repeated) < 1.02

    def test_inference_rows(self, timm_infer):
        inference = timm_infer
        assert Counter(record.device for record in inference) == {
            "rtx-3090": 7229, "rtx-4090": 7580, "rtx-5090": 3254, "rtx-pro-6000-max-q": 6507,
        }  # fmt: skip
        assert {record.phase for record in inference} == {Phase.INFERENCE}
        assert sum(record.precision is Precision.BF16 for record in inference) == 1622


@pytest.mark.reference
class TestManyGpus:
    def test_torchvision_rows(self, folder):
        records = read_torchvision(folder)
        assert Counter(str(record.phase) for record in records) == {"train": 549, "inference": 549}
        assert Counter(record.device for record in records if record.phase is Phase.TRAIN) == {
            "rtx-2060-max-q": 64, "rtx-3090": 64, "rtx-2080-ti": 188, "titan-rtx": 64, "titan-v": 30,
            "a100-sxm4-40gb": 64, "gtx-1080-ti": 45, "v100-sxm2-16gb": 30,
        }  # fmt: skip
        assert {record.precision for record in records} == {Precision.FP32, Precision.TF32, Precision.FP16}
        assert not any(record.includes_optimizer for record in records)
        assert {record.batch_size_per_device for record in records} == {12, 15}
        assert len({record.row_id for record in records}) == len(records)

    def test_the_three_times_too_slow_rows_are_gone(self, folder):
        slow = [
            r for r in read_torchvision(folder) if r.device == "gtx-1080-ti" and r.batch_size_per_device == 15
        ]
        assert slow
        assert all(record.precision is Precision.FP16 for record in slow)

    def test_lambda_rows_are_medians_of_replicas(self, folder):
        records = read_lambda_resnet50(folder)
        assert len(records) == 85
        assert len({record.device for record in records}) == 24
        assert all(record.includes_optimizer and record.num_devices == 1 for record in records)
        frame = pd.read_parquet(folder / "gpu_benchmarks.parquet")
        replicas = frame[
            (frame["source"] == "lambdal/deeplearning-benchmark") & (frame["model"] == "resnet50")
            & (frame["n_gpus"] == 1) & (frame["gpu"] == "GTX 1080 Ti") & (frame["dtype"] == "amp")
        ]["step_time_ms"]  # fmt: skip
        found = [r for r in records if r.device == "gtx-1080-ti" and r.precision is Precision.AMP]
        assert [record.step_time_s for record in found] == [pytest.approx(replicas.median() / 1e3)]
        assert found[0].step_time_std_s == pytest.approx(replicas.std() / 1e3)


@pytest.mark.reference
class TestTransformers:
    def test_rows_on_one_gpu(self, folder):
        rows = read_neusight_e2e(folder)
        assert len(rows) == 97
        training = [row for row in rows if row.record.phase is Phase.TRAIN]
        assert len(training) == 28
        for row in training:
            assert row.forward_time_s + row.backward_time_s == pytest.approx(row.record.step_time_s, rel=1e-4)
        assert all(row.backward_time_s is None for row in rows if row.record.phase is Phase.INFERENCE)

    def test_published_error_of_neusight_is_reproduced(self, folder):
        """7.9 % on the 13 training rows of one NVIDIA GPU, as the table's notes recompute it."""
        errors = [
            abs(row.published_time_s["neusight"] / row.record.step_time_s - 1)
            for row in read_neusight_e2e(folder)
            if row.record.phase is Phase.TRAIN and not row.record.device.startswith("mi")
        ]
        assert len(errors) == 13
        assert sum(errors) / 13 == pytest.approx(0.079, abs=5e-4)

    def test_configurations_have_the_published_number_of_parameters(self, folder):
        """Published sizes: BERT-large 0.34 B, GPT-2 large 0.77 B, GPT-3 2.7B, OPT-1.3B, Switch-XL-4 5.3 B."""
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        first_rows = {row.record.model: row for row in reversed(read_neusight_e2e(folder))}
        published = {
            "bert_large": 0.34e9, "gpt2_large": 0.774e9, "gpt3_27": 2.65e9, "opt_13": 1.316e9,
            "switchxl4": 5.3e9,
        }  # fmt: skip
        for model, num_parameters in published.items():
            fields = transformer_config(first_rows[f"hf:{model}"])
            architecture = fields["architectures"][0]
            config = transformers.AutoConfig.for_model(**fields)
            with torch.device("meta"):
                built = getattr(transformers, architecture)(config)
            assert sum(p.numel() for p in built.parameters()) == pytest.approx(num_parameters, rel=0.02), (
                model
            )

    def test_sequences_fit_into_the_configuration(self, folder):
        for row in read_neusight_e2e(folder):
            fields = transformer_config(row)
            longest = fields.get("max_position_embeddings", fields.get("n_positions"))
            assert longest is None or longest >= row.record.sequence_length
