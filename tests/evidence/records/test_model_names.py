import doctest

import pytest

from forerun.evidence.records import model_names
from forerun.evidence.records.model_names import canonical_network, model_family


def test_examples_in_the_docstrings_run():
    results = doctest.testmod(model_names)
    assert results.attempted >= 2
    assert results.failed == 0


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("resnet50", "resnet"),
        ("timm:tf_efficientnet_b0_ns", "efficientnet"),
        ("ens_adv_inception_resnet_v2", "inception"),
        ("legacy_seresnext26_32x4d", "seresnext"),
        ("jx_nest_tiny", "nest"),
        ("torchvision:wide_resnet50_2", "wide"),
        ("vit_base_patch16_clip_224.openai", "vit"),
        ("tf", "tf"),
        ("3d", "3d"),
    ],
)
def test_family_is_the_name_up_to_the_first_underscore_or_digit(name, family):
    assert model_family(name) == family


@pytest.mark.parametrize(
    ("variant", "network"),
    [
        ("ssl_resnet18", "resnet18"),
        ("tv_resnet50", "torchvision:resnet50"),
        ("gluon_resnet50_v1b", "resnet50"),
        ("gluon_resnet50_v1d", "resnet50d"),
        ("gluon_seresnext50_32x4d", "seresnext50_32x4d"),
        ("tf_efficientnet_b4_ns", "tf_efficientnet_b4_ap"),
        ("convnext_large_384_in22ft1k", "convnext_large_384"),
        ("tresnet_m_miil_in21k", "tresnet_m"),
        ("xcit_small_12_p8_224_dist", "xcit_small_12_p8_224"),
        ("resmlp_big_24_distilled_224", "resmlp_big_24_224_in22ft1k"),
        ("ens_adv_inception_resnet_v2", "inception_resnet_v2"),
        ("mnasnet_b1", "mnasnet_100"),
        ("vit_base_patch16_224.augreg_in21k", "vit_base_patch16_224"),
    ],
)
def test_variants_of_one_network_agree(variant, network):
    assert canonical_network(variant) == canonical_network(network)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("resnet50", "resnet50d"),
        ("tf_efficientnet_b0", "efficientnet_b0"),
        ("legacy_seresnet50", "seresnet50"),
        ("swinv2_cr_tiny_ns_224", "swinv2_cr_tiny_224"),
        ("efficientnet_es_pruned", "efficientnet_es"),
        ("vit_base_patch16_224", "vit_base_patch16_384"),
    ],
)
def test_different_networks_stay_apart(one, other):
    assert canonical_network(one) != canonical_network(other)


def test_names_are_stable():
    for name in ("timm:gluon_resnet101_v1c", "swsl_resnext101_32x8d", "convnext_base_in22ft1k"):
        assert canonical_network(canonical_network(name)) == canonical_network(name)
