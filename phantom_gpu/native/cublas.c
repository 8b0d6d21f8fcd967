/* What cuBLAS answers; its products do nothing. */
#include <stdlib.h>

int cublasCreate_v2(void **handle) {
  *handle = calloc(1, 64);
  return 0;
}
int cublasGetMathMode(void *handle, int *mode) {
  *mode = 0;
  return 0;
}
int cublasGetPointerMode_v2(void *handle, int *mode) {
  *mode = 0;
  return 0;
}
int cublasGetVersion_v2(void *handle, int *version) {
  *version = 130000;
  return 0;
}
int cublasGetStream_v2(void *handle, void **stream) {
  *stream = NULL;
  return 0;
}
const char *cublasGetStatusString(int status) { return "phantom"; }
