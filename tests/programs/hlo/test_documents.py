"""Packed documents in the program of a flat mesh, and of a ring; by night in a pipeline, and of zigzag."""

from tests.document_programs import check_documents, check_hops, check_packed, on_a_ring
from ultrascale_jax.hlo.attention import attention_calls


def test_documents_are_a_call_for_each_class_of_lengths_and_no_mask():
    check_documents(fsdp=8)


def test_on_a_ring_own_documents_are_packed_and_blocks_of_others_have_lengths():
    check_packed("ring")


def test_outside_of_loops_over_hops_keys_go_one_hop_and_their_gradients_come_back():
    check_hops("ring")


def test_keys_forward_and_sums_backward_travel_beside_the_ranks_own_documents():
    """Backward a rank waits for the keys of the one before."""
    _, step = on_a_ring("ring")
    attention = {call.instruction.name for call in attention_calls(step.module)}
    hidden = []
    for name, loops in step.module.walk():
        body = step.module.computations[name]
        places = {i.name: place for place, i in enumerate(body)}
        for end in body:
            if end.opcode == "collective-permute-done" and None not in loops:
                between = {i.name for i in body[places[end.operands[0]] : places[end.name]]}
                hidden.append((end.arrays[0].dtype, bool(between & attention)))
    assert sorted(hidden) == [("bf16", False), ("bf16", True), ("f32", True)]
