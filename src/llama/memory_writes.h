// Cuts a graph without outputs to what it writes to the KV cache. Of a drafter's block that is the last layer of its
// context, such a decode leaves keys and values alone: its attention and its experts feed nothing.
// Must not know: which drafter. Test: tests/model/engine/test_mtp_feed.py.

#pragma once

struct llm_graph_context;

namespace draftwood {

// Keeps the nodes that the graph's KV writes need. Inputs stay: llama.cpp fills them all. Call it on a new graph that
// nobody has allocated. A graph without KV writes is left as it is. Throws std::bad_alloc.
void keep_memory_writes(llm_graph_context & graph);

} // namespace draftwood
