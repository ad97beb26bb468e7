"""Pure speculation: token ids, scores and costs. No model, no tensor library, no cache."""
