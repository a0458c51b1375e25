// What the patched line of ggml-cpu calls. Compiled inside the ggml-cpu target. Test: tests/ops.

#pragma once

// ggml_backend_cpu_get_proc_address, first: a `const dw::op_descriptor *` by the op's name, or
// "dw_top_rows_layout" (ops/top-rows/row.h), or "dw_slot_memory" (ops/expert-slots/slot-memory.h); NULL: none of ours
void * dw_cpu_find(const char * name);
