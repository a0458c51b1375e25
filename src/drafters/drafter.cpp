// The drafter that an engine's parameters ask for.

#include "drafters/drafter.h"

#include "drafters/dflash.h"
#include "drafters/mtp.h"
#include "drafters/ngram.h"
#include "llama/facts.h"

namespace draftwood {

void drop_failed(drafter & who, token_tree & tree) {
    who.reset();
    tree = token_tree(tree.tokens[0]);
}

std::unique_ptr<drafter> make_drafter(target_context & target, const llama_context_params & context_params,
                                      const dw_params & params) {
    switch (params.drafter) {
        case DW_DRAFTER_NONE:
        case DW_DRAFTER_GIVEN:
            return nullptr;
        case DW_DRAFTER_MTP: {
            const llama_model * model = llama_get_model(target.get());
            if (n_mtp_blocks(model) < 1) {
                fail(DW_ERR_UNSUPPORTED, "the model has no MTP block (nextn_predict_layers is 0)");
            }
            if (!mtp_block_of(model).projection) {
                fail(DW_ERR_UNSUPPORTED,
                     "the model was loaded without the tensors of its MTP block; set load_mtp in llama_model_params");
            }
            return std::make_unique<mtp_drafter>(target, context_params, params);
        }
        case DW_DRAFTER_NGRAM:
            return std::make_unique<ngram_drafter>();
        case DW_DRAFTER_DFLASH:
            if (!params.drafter_path) {
                fail(DW_ERR_ARGUMENT, "drafter_path is NULL; expected the GGUF of a DFlash drafter");
            }
            return std::make_unique<dflash_drafter>(target, context_params, params);
        default:
            fail(DW_ERR_ARGUMENT, "drafter is %d; expected a value of dw_drafter_type", params.drafter);
    }
}

} // namespace draftwood
