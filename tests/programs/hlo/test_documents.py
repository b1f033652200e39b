"""Packed documents in the program of a flat mesh."""

from tests.document_programs import check_documents


def test_documents_are_a_call_for_each_class_of_lengths_and_no_mask():
    check_documents(fsdp=8)
