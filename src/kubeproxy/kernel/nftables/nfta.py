"""The numbers of nf_tables' attributes: NFTA_... of include/uapi/linux/netfilter/nf_tables.h of Linux 6.18. In each
kind of message the numbers start at 1."""

from __future__ import annotations

from typing import Final

TABLE_NAME: Final = 1
TABLE_FLAGS: Final = 2
TABLE_HANDLE: Final = 4
TABLE_USERDATA: Final = 6
TABLE_OWNER: Final = 7

CHAIN_TABLE: Final = 1
CHAIN_HANDLE: Final = 2
CHAIN_NAME: Final = 3
CHAIN_HOOK: Final = 4
CHAIN_POLICY: Final = 5
CHAIN_TYPE: Final = 7
HOOK_NUMBER: Final = 1
HOOK_PRIORITY: Final = 2
HOOK_DEVICES: Final = 3
HOOK_DEVICE: Final = 1
FLOWTABLE_TABLE: Final = 1
FLOWTABLE_NAME: Final = 2
FLOWTABLE_HOOK: Final = 3

RULE_TABLE: Final = 1
RULE_CHAIN: Final = 2
RULE_HANDLE: Final = 3
RULE_EXPRESSIONS: Final = 4
RULE_COMPAT: Final = 5
RULE_COMPAT_PROTO: Final = 1
RULE_COMPAT_FLAGS: Final = 2

SET_TABLE: Final = 1
SET_NAME: Final = 2
SET_FLAGS: Final = 3
SET_KEY_TYPE: Final = 4
SET_KEY_LENGTH: Final = 5
SET_DATA_TYPE: Final = 6
SET_DATA_LENGTH: Final = 7
SET_DESC: Final = 9
SET_DESC_SIZE: Final = 1
SET_DESC_CONCAT: Final = 2
SET_FIELD_LENGTH: Final = 1
SET_ID: Final = 10
SET_TIMEOUT: Final = 11
SET_USERDATA: Final = 13
SET_EXPR: Final = 17
SET_COUNT: Final = 20

SET_ELEM_LIST_SET: Final = 2
SET_ELEM_LIST_ELEMENTS: Final = 3
SET_ELEM_LIST_SET_ID: Final = 4

SET_ELEM_KEY: Final = 1
SET_ELEM_DATA: Final = 2
SET_ELEM_FLAGS: Final = 3
SET_ELEM_TIMEOUT: Final = 4
SET_ELEM_EXPIRATION: Final = 5
SET_ELEM_EXPR: Final = 7
SET_ELEM_KEY_END: Final = 10

LIST_ELEM: Final = 1
"""An entry of a list, such as a set's list of elements or a rule's list of expressions."""

DATA_VALUE: Final = 1
DATA_VERDICT: Final = 2
VERDICT_CODE: Final = 1
VERDICT_CHAIN: Final = 2

GEN_ID: Final = 1
GEN_PROC_NAME: Final = 3

TRACE_TABLE: Final = 1
TRACE_CHAIN: Final = 2
TRACE_RULE_HANDLE: Final = 3
TRACE_TYPE: Final = 4
TRACE_VERDICT: Final = 5
TRACE_ID: Final = 6
TRACE_NETWORK_HEADER: Final = 8
TRACE_TRANSPORT_HEADER: Final = 9
TRACE_IIF: Final = 10
TRACE_OIF: Final = 12
TRACE_POLICY: Final = 16

OBJ_TABLE: Final = 1
OBJ_NAME: Final = 2
OBJ_TYPE: Final = 3
OBJ_DATA: Final = 4

EXPR_NAME: Final = 1
EXPR_DATA: Final = 2
COUNTER_BYTES: Final = 1
COUNTER_PACKETS: Final = 2
MATCH_NAME: Final = 1
MATCH_REV: Final = 2
MATCH_INFO: Final = 3
"""Equal to NFTA_TARGET_NAME, NFTA_TARGET_REV, NFTA_TARGET_INFO (nf_tables_compat.h)."""
