/* Collectives that do nothing and have always finished. */
int ncclGetVersion(int *version) {
  *version = 22907;
  return 0;
}
int ncclCommGetAsyncError(void *communicator, int *error) {
  *error = 0;
  return 0;
}
const char *ncclGetErrorString(int error) { return "phantom"; }
const char *ncclGetLastError(void *communicator) { return "phantom"; }
