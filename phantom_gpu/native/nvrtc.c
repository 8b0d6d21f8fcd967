/* The runtime compiler hands out an empty program: TorchScript's fuser asks for one. */
#include <stdlib.h>
#include <string.h>

int nvrtcVersion(int *major, int *minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
int nvrtcGetNumSupportedArchs(int *count) {
  *count = 6;
  return 0;
}
int nvrtcGetSupportedArchs(int *architectures) {
  static const int known[] = {75, 80, 86, 90, 100, 120};
  memcpy(architectures, known, sizeof known);
  return 0;
}
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char **texts,
                       const char **names) {
  *program = calloc(1, 64);
  return 0;
}
int nvrtcGetProgramLogSize(void *program, size_t *bytes) {
  *bytes = 1;
  return 0;
}
int nvrtcGetPTXSize(void *program, size_t *bytes) {
  *bytes = 1;
  return 0;
}
int nvrtcGetCUBINSize(void *program, size_t *bytes) {
  *bytes = 1;
  return 0;
}
int nvrtcGetLoweredName(void *program, const char *expression, const char **name) {
  *name = "phantom";
  return 0;
}
const char *nvrtcGetErrorString(int error) { return "phantom"; }
