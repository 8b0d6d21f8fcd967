/* cublasLt finds one algorithm for every product, and it needs no workspace. */
#include <stdint.h>
#include <string.h>

struct heuristic { /* cublasLtMatmulHeuristicResult_t */
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, struct heuristic *found, int *count) {
  memset(found, 0, sizeof *found);
  *count = 1;
  return 0;
}
