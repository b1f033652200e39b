"""The alphabet on an abstract mesh of 4,096 devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ultrascale_jax.config import AXES, MeshConfig, UserError
from ultrascale_jax.sharding.manual import smap
from ultrascale_jax.sharding.mesh import abstract_mesh, make_mesh
from ultrascale_jax.sharding.primitives import einsum
from ultrascale_jax.sharding.rules import (
    SHARD,
    act,
    axes_of,
    check_shards,
    gathered_spec,
    gradient_axes,
    manual,
    stored_spec,
)

MESH = MeshConfig(dp=4, fsdp=32, cp=2, sp=8, tp=2)


@pytest.fixture(autouse=True)
def mesh(request):
    with jax.sharding.use_abstract_mesh(abstract_mesh(getattr(request, "param", MESH))):
        yield


def test_activations_split_as_the_alphabet_says():
    assert act("BTF") == P(("dp", "fsdp", "ep"), ("cp",), ("sp", "tp"))
    assert act("BRD") == P(("dp", "fsdp", "ep"), ("cp", "sp"), None)
    assert axes_of("RN") == {"cp", "sp", "tp"}


def test_zero_splits_in_the_order_of_the_mesh():
    """In another one XLA all-reduces gradients instead of scattering them."""
    assert SHARD == tuple(axis for axis in AXES if axis in SHARD)


def test_zero_splits_a_latent_where_there_is_no_model_dim_and_experts_without_ep():
    assert stored_spec("QNH", (64, 64, 8)) == P(("fsdp", "ep", "cp"), ("sp", "tp"), None)
    assert stored_spec("EDF", (8, 64, 128)) == P(("ep",), ("fsdp", "cp"), ("sp", "tp"))
    assert stored_spec("J", (64,)) == P(None)


def test_folded_experts_are_whole_on_the_ranks_of_ep_and_sp():
    assert act("Y") == P(("ep", "sp"))
    assert stored_spec("LYDW", (2, 8, 64, 6)) == P(None, ("ep", "sp"), ("fsdp", "cp"), None)
    assert gradient_axes("YWD", "BRW") == gradient_axes("EFD", "BTF") == {"dp", "fsdp", "cp"}


def test_a_matrix_that_zero_would_leave_whole_is_refused_but_for_an_adapters_rank():
    """64 shards; 32 of experts' matrices of 2 devices of ep, were there any."""
    for dims, shape in (("QNH", (64, 64, 8)), ("UF", (16, 64)), ("H", (8,)), ("XD", (8, 100))):
        check_shards(dims, shape)
    for dims, shape in (("QNH", (96, 64, 8)), ("LDF", (4, 100, 128)), ("EFD", (8, 128, 96))):
        with pytest.raises(
            UserError, match=rf"{dims} is .*divisible by mesh\.fsdp.*=64, .*mesh\.dp"
        ):
            check_shards(dims, shape)


def test_zero_splits_the_model_dim_of_matrices_only():
    assert stored_spec("LDF", (4, 64, 128)) == P(None, ("fsdp", "ep", "cp"), ("sp", "tp"))
    assert stored_spec("LDF", (4, 64, 128), zero=0) == P(None, None, ("sp", "tp"))
    assert stored_spec("LD", (4, 64)) == P(None, None)
    assert gathered_spec("LDF", (4, 64, 128)) == P(None, None, ("sp", "tp"))


def test_kv_heads_fewer_than_the_tensor_group_are_replicated():
    assert gathered_spec("DKH", (64, 8, 16)) == P(None, None, None)
    assert gathered_spec("DKH", (64, 16, 16)) == P(None, ("sp", "tp"), None)


@pytest.mark.parametrize("mesh", [MeshConfig(pp=2, fsdp=2, sp=2)], indirect=True)
def test_a_pipeline_splits_layers_and_vocabulary_too(mesh):
    assert stored_spec("LDF", (4, 64, 128)) == P(("pp",), ("fsdp", "ep", "cp"), ("sp", "tp"))
    assert stored_spec("VD", (64, 32)) == P(("pp", "sp", "tp"), ("fsdp", "ep", "cp"))
    assert act("BTV") == P(("dp", "fsdp", "ep"), ("cp",), ("pp", "sp", "tp"))


def test_in_a_region_manual_over_all_axes_nothing_is_left_to_split():
    def region(x):
        assert manual()
        assert act("BF", unreduced=frozenset(["tp"])) == stored_spec("DF", (8, 8)) == P(None, None)
        return x

    assert not manual()
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    jax.eval_shape(smap(region, in_specs=P(), out_specs=P()), x)


def test_a_contraction_over_the_tensor_group_ends_where_it_is_told():
    def shape(dims, *sizes):
        return jax.ShapeDtypeStruct(
            sizes, jnp.float32, sharding=jax.NamedSharding(abstract_mesh(MESH), act(dims))
        )

    h, w = shape("BTF", 128, 64, 96), shape("FD", 96, 32)
    for to, spec in (("BRD", act("BRD")), ("BTD", act("BTD"))):
        out = jax.eval_shape(lambda h, w, to=to: einsum("BTF,FD->BTD", h, w, to=to), h, w)
        assert out.sharding.spec == spec
        assert out.shape == (128, 64, 32)


def test_a_mesh_of_the_wrong_size_names_the_axis_and_the_fix():
    with pytest.raises(ValueError, match=r"mesh='fsdp=3'.*8 devices"):
        make_mesh(MeshConfig(fsdp=3))


@pytest.mark.parametrize(
    ("subscripts", "words"),
    [
        ("BTD,BTF->DF", "contracts BT, which cp, dp, ep, fsdp split"),  # a weight's gradient
        ("BRD,BRX->DX", "contracts BR, which cp, dp, ep, fsdp split"),
        ("BTH,BSH->TS", "contracts BH, which dp, ep, fsdp split"),
    ],
)
def test_einsum_refuses_to_contract_what_batch_and_context_split(subscripts, words):
    x = jax.ShapeDtypeStruct((256, 64, 64), jnp.float32)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda a, b: einsum(subscripts, a, b), x, x)


@pytest.mark.parametrize("mesh", [MeshConfig(pp=2, fsdp=2, sp=2)], indirect=True)
def test_einsum_refuses_to_contract_a_vocabulary_over_pipeline_ranks(mesh):
    x, head = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4, 64), (32, 64)))
    with pytest.raises(ValueError, match="contracts V, which pp split"):
        jax.eval_shape(lambda x, head: einsum("BTV,DV->BTD", x, head), x, head)
