// See memory.h.

#include "llama/memory.h"

#include "ggml-cpp.h"
#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama/recurrent_cells.h"

#include <algorithm>
#include <array>
#include <typeinfo>
#include <utility>

// As seq_rm(seq_id, p0, -1) of one sequence, which looks at all cells. A patched line declares it.
void llama_kv_cache::dw_remove_from(llama_seq_id seq_id, llama_pos p0) {
    if (other) {
        return; // its cells are another cache's
    }
    llama_kv_cells & cells  = v_cells[seq_to_stream[seq_id]];
    uint32_t &       head   = v_heads[seq_to_stream[seq_id]];
    const auto &     placed = cells.seq_pos_get(seq_id);
    while (!placed.empty() && placed.rbegin()->first >= p0) {
        const uint32_t cell = placed.rbegin()->second;
        if (cells.seq_rm(cell, seq_id)) { // nobody else has it
            head = std::min(head, cell);
        }
    }
}

namespace draftwood {

namespace {

// The attention caches of memories whose caches are independent; the others are null. Caches of other memories must
// agree with each other on n_kv.
std::array<llama_kv_cache *, 2> caches_of(llama_memory_t memory) {
    const auto both = [](llama_kv_cache_iswa & pair) {
        return std::array<llama_kv_cache *, 2>{ pair.get_base(), pair.get_swa() };
    };
    if (!memory) {
        return {};
    }
    const std::type_info & type = typeid(*memory);
    if (type == typeid(llama_kv_cache)) {
        return { static_cast<llama_kv_cache *>(memory) };
    }
    if (type == typeid(llama_kv_cache_iswa)) {
        return both(static_cast<llama_kv_cache_iswa &>(*memory));
    }
    if (type == typeid(llama_memory_hybrid)) {
        return { static_cast<llama_memory_hybrid &>(*memory).get_mem_attn() };
    }
    if (type == typeid(llama_memory_hybrid_iswa)) {
        return both(*static_cast<llama_memory_hybrid_iswa &>(*memory).get_mem_attn());
    }
    return {};
}

template <typename F> void for_each_cache(llama_memory_t memory, F && use) {
    for (llama_kv_cache * cache : caches_of(memory)) {
        if (cache) {
            use(*cache);
        }
    }
}

// the cache offers its cells read-only
llama_kv_cells & cells_of(const llama_kv_cache & cache, llama_seq_id seq) {
    return const_cast<llama_kv_cells &>(cache.get_cells(seq));
}

// The cache itself only offers views. cparams.flash_attn does not tell whether values are transposed: where it was
// `auto`, llama.cpp may have turned it off after the cache was made.
std::pair<ggml_tensor *, bool> value_storage(const llama_kv_cache & cache, int32_t il) {
    ggml_context_ptr          views(ggml_init({ 4 * ggml_tensor_overhead(), nullptr, /*no_alloc*/ true }));
    llama_kv_cache::slot_info whole{ 0, 0, {}, {} };
    const ggml_tensor *       view = cache.get_v(views.get(), il, 1, whole);
    return { view->view_src, view->nb[1] > view->nb[2] };
}

} // namespace

void set_kv_step(llama_context * ctx, uint32_t n_cells) noexcept {
    for_each_cache(llama_get_memory(ctx), [&](llama_kv_cache & cache) { cache.dw_n_kv_step = n_cells; });
}

void keep_in_pages(llama_context * ctx, bool on) noexcept {
    if (llama_kv_cache * cache = caches_of(llama_get_memory(ctx))[0]) {
        cache->dw_has_pages = on && cache->get_n_stream() == 1 && cache->get_n_seq_max() > 1;
    }
}

void fill_masks(llama_context * ctx, bool on) noexcept {
    for_each_cache(llama_get_memory(ctx), [&](llama_kv_cache & cache) { cache.dw_fills_masks = on; });
}

int32_t free_cells(llama_context * ctx, llama_seq_id seq) {
    const llama_kv_cache * cache = caches_of(llama_get_memory(ctx))[0]; // of a pair the one of all positions
    if (!cache) {
        return INT32_MAX;
    }
    const llama_kv_cells & cells = cache->get_cells(seq);
    return (int32_t) (cells.size() - cells.get_used());
}

int64_t n_kv_cells(const llama_context * ctx) {
    return dynamic_cast<const llama_kv_cache &>(*llama_get_memory(ctx)).get_size();
}

// At positions behind all others, dw_remove_from finds the cells and moves the cache's head back as no other call does.
void drop_cells(llama_context * ctx, llama_seq_id seq, const std::vector<uint32_t> & cells) {
    auto &           cache = dynamic_cast<llama_kv_cache &>(*llama_get_memory(ctx));
    llama_kv_cells & all   = cells_of(cache, seq);
    const llama_pos  end   = cache.seq_pos_max(seq) + 1;
    for (const uint32_t cell : cells) {
        all.rm(cell);
        all.pos_set(cell, end);
        all.seq_add(cell, seq);
    }
    cache.dw_remove_from(seq, end);
}

bool remove_from(llama_context * ctx, llama_seq_id seq, llama_pos pos) {
    llama_memory_t memory = llama_get_memory(ctx);
    if (!memory || (typeid(*memory) != typeid(llama_kv_cache) && typeid(*memory) != typeid(llama_kv_cache_iswa))) {
        return llama_memory_seq_rm(memory, seq, pos, -1);
    }
    for_each_cache(memory, [&](llama_kv_cache & cache) { cache.dw_remove_from(seq, pos); });
    return true;
}

std::optional<hybrid_memory> hybrid_memory::of(const llama_context * ctx) {
    auto * memory = dynamic_cast<llama_memory_hybrid *>(llama_get_memory(ctx));
    return memory ? std::optional<hybrid_memory>(hybrid_memory(memory)) : std::nullopt;
}

std::vector<hybrid_memory::recurrent_layer> hybrid_memory::recurrent_layers() const {
    const llama_memory_recurrent & recurrent = *memory_->get_mem_recr();
    std::vector<recurrent_layer>   layers;
    for (size_t il = 0; il < recurrent.s_l.size(); ++il) {
        if (recurrent.s_l[il]) {
            layers.push_back({ (int32_t) il, recurrent.s_l[il], recurrent.r_l[il] });
        }
    }
    return layers;
}

std::vector<hybrid_memory::attention_layer> hybrid_memory::attention_layers() const {
    const llama_kv_cache &       cache = *memory_->get_mem_attn();
    std::vector<attention_layer> layers;
    for (const uint32_t il : cache.get_layer_ids()) {
        const auto [values, transposed] = value_storage(cache, (int32_t) il);
        layers.push_back({ (int32_t) il, cache.get_k_storage((int32_t) il), values, transposed });
    }
    return layers;
}

int64_t hybrid_memory::n_kv_cells() const {
    return memory_->get_mem_attn()->get_size();
}

int32_t hybrid_memory::state_cell(llama_seq_id seq) const {
    const auto & cells = memory_->get_mem_recr()->cells;
    return (size_t) seq < cells.size() ? cells[seq].tail : -1;
}

bool hybrid_memory::has_own_state(llama_seq_id seq) const {
    const llama_memory_recurrent & recurrent = *memory_->get_mem_recr();
    return own_cell(recurrent, seq) >= 0 && (recurrent.rs_idx.empty() || recurrent.rs_idx[seq] == 0);
}

bool hybrid_memory::are_home(const std::vector<llama_seq_id> & sequences) const {
    return draftwood::are_home(*memory_->get_mem_recr(), sequences);
}

void hybrid_memory::put_home() noexcept {
    draftwood::put_home(*memory_->get_mem_recr());
}

std::vector<row_piece> hybrid_memory::move_state(llama_seq_id seq, int32_t to) {
    llama_memory_recurrent & recurrent = *memory_->get_mem_recr();
    const int32_t            from      = own_cell(recurrent, seq);
    std::vector<row_piece>   copies;
    if (from < 0 || from == to || !recurrent.cells[to].is_empty()) {
        return copies;
    }
    for (const recurrent_layer & layer : recurrent_layers()) {
        for (const ggml_tensor * of : { layer.states, layer.conv_states }) {
            char * const cells = (char *) of->data;
            copies.push_back({ cells + to * of->nb[1], cells + from * of->nb[1], of->nb[1] });
        }
    }
    exchange(recurrent, from, to);
    recurrent.cells[to].src   = to;
    recurrent.cells[from].src = -1;
    return copies;
}

llama_pos hybrid_memory::state_pos(llama_seq_id seq) const {
    return memory_->get_mem_recr()->cells[state_cell(seq)].pos;
}

void hybrid_memory::set_state_pos(llama_seq_id seq, llama_pos pos) {
    memory_->get_mem_recr()->cells[state_cell(seq)].pos = pos;
}

void hybrid_memory::rename_cells(llama_seq_id seq, const std::vector<uint32_t> & cells, llama_pos pos,
                                 const std::vector<llama_token> & tokens, bool two_dimensional) {
    llama_kv_cache & cache = *memory_->get_mem_attn();
    llama_kv_cells & all   = cells_of(cache, seq);
    for (size_t i = 0; i < cells.size(); ++i) {
        const llama_pos   here  = pos + (llama_pos) i;
        const llama_token token = i < tokens.size() ? tokens[i] : LLAMA_TOKEN_NULL;
        all.rm(cells[i]);
        all.pos_set(cells[i], here);
        all.ext_set(cells[i], { two_dimensional ? here : 0, two_dimensional ? here : 0, token });
        all.seq_add(cells[i], seq);
    }
    if (tokens.size() < cells.size()) { // it moves the cache's head back, as no other call does
        cache.dw_remove_from(seq, pos + (llama_pos) tokens.size());
    }
}

} // namespace draftwood
